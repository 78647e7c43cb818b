// Runs a kernel over a grid: every thread of a threadgroup is a fiber with its own stack, and
// fibers change over where lanes of a SIMD group, or all threads of a threadgroup, have to meet.
//
// Within a SIMD group the lanes take turns in one fixed order: each runs to its next meeting and
// hands over to the next lane; the last one closes the meeting. A SIMD group runs until it stands
// at a threadgroup barrier or has ended; then the next group runs.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/time.h>

#include "runtime.h"
#include "runtime_switch.h"

enum { MAX_THREADS = 1024, MAX_GROUPS = MAX_THREADS / EMULATOR_LANES, MAX_SHARED = 16 };
enum { FORWARD, REVERSE, SHUFFLED };
enum { RAN, DIVERGED, FAULTED, TOO_MUCH_SHARED, TOO_LONG };

typedef void (*EmulatorEntry)(void* const* buffers, const EmulatorThread* thread);

// Keep in step with Launch in launch.py.
struct EmulatorLaunch {
  EmulatorEntry entry;
  void* const* buffers;
  uint32_t grid[3];
  uint32_t threadgroup[3];
  uint32_t lane_order;
  uint32_t seed;
  uint32_t reduction;
  uint32_t flush;
  uint32_t poison;         // a byte
  uint32_t shared_at_end;  // threadgroup arrays end, rather than start, at a gap
  uint8_t* stacks;         // MAX_THREADS pieces, the lowest page of each is a guard page
  uint64_t stack_bytes;
  uint8_t* shared;  // MAX_SHARED pieces of `shared_bytes`, each followed by a gap
  uint64_t shared_bytes;
  uint64_t shared_gap;
  uint8_t* signal_stack;
  uint64_t signal_stack_bytes;
  uint64_t milliseconds;  // of the processor's time, before it counts as endless
  // What happened.
  uint32_t status;
  uint32_t signal_number;
  uint32_t trap;  // 1 + the compiler's number of the check that failed, 0 when unknown
  uint32_t shared_used;
  uint32_t thread[3];
  uint32_t line;
  uint32_t other_line;
  uint32_t same_key;  // the two lanes called the same operation with different arguments
  uint64_t address;
  const char* what;
  const char* file;
  const char* other_what;
  const char* other_file;
};

struct Site {
  unsigned operation, line, key;
  const char* what;
  const char* file;
  uint64_t path;  // of calls that lead here
};

struct Group {
  EmulatorMeeting meeting[2];
  unsigned turn;  // which of the two is being gathered
  unsigned lanes, here, cursor;
  bool ended, waits;
  Site site;
  uint8_t order[EMULATOR_LANES];
};

static struct {
  EmulatorLaunch* launch;
  Group* group;
  unsigned group_index, lane;
  EmulatorThread common;
  void* main;
  void* lane_sp[MAX_THREADS];
  Group groups[MAX_GROUPS];
  unsigned declarations[MAX_SHARED], shared_count, shared_bytes;
  uint64_t random;
  jmp_buf leave;
} state;
static thread_local bool running;
static pthread_t runner;

static unsigned random_below(unsigned n) {
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  return unsigned((state.random >> 32) % n);
}

static void make_order(uint8_t* order, unsigned n) {
  for (unsigned i = 0; i < n; i++)
    order[i] = uint8_t(state.launch->lane_order == REVERSE ? n - 1 - i : i);
  if (state.launch->lane_order != SHUFFLED) return;
  for (unsigned i = n - 1; i > 0; i--) {
    uint8_t kept = order[i], *other = order + random_below(i + 1);
    order[i] = *other;
    *other = kept;
  }
}

static void thread_of(unsigned index, EmulatorThread* t) {
  *t = state.common;
  unsigned wide = t->threads_per_threadgroup[0], high = t->threads_per_threadgroup[1];
  unsigned at[3] = {index % wide, index / wide % high, index / wide / high};
  t->thread_index_in_threadgroup = index;
  for (int i = 0; i < 3; i++) {
    t->thread_position_in_threadgroup[i] = at[i];
    t->thread_position_in_grid[i] =
        t->threadgroup_position_in_grid[i] * t->dispatch_threads_per_threadgroup[i] + at[i];
  }
}

[[noreturn]] static void stop(unsigned status) {
  EmulatorThread t;
  thread_of(state.group_index * EMULATOR_LANES + state.lane, &t);
  memcpy(state.launch->thread, t.thread_position_in_grid, sizeof t.thread_position_in_grid);
  state.launch->status = status;
  longjmp(state.leave, 1);
}

[[noreturn]] static void diverge(const Site& first, const Site& second) {
  EmulatorLaunch* l = state.launch;
  l->what = first.what;
  l->file = first.file;
  l->line = first.line;
  l->other_what = second.what;
  l->other_file = second.file;
  l->other_line = second.line;
  l->same_key = first.operation == second.operation && first.line == second.line &&
                first.file == second.file && first.key != second.key;
  stop(DIVERGED);
}

static void go_to(void** from, unsigned lane) {
  state.lane = lane;
  emulator_switch(from, state.lane_sp[state.group_index * EMULATOR_LANES + lane]);
}

// Takes this lane to `site`; returns when all lanes of the group have been there. Never returns
// from the end of the kernel.
static inline void arrive(const Site& site) {
  Group* g = state.group;
  if (g->here == 0) {
    g->site = site;
    g->meeting[g->turn].done = 0;
  } else if (g->site.operation != site.operation || g->site.line != site.line ||
             g->site.key != site.key || g->site.path != site.path) {
    diverge(g->site, site);
  }
  void** mine = &state.lane_sp[state.group_index * EMULATOR_LANES + state.lane];
  if (++g->here < g->lanes) {
    go_to(mine, g->order[++g->cursor]);
    return;
  }
  g->here = 0;
  g->cursor = 0;
  g->turn ^= 1;
  g->ended = site.operation == EMULATOR_RETURN;
  g->waits = site.operation == EMULATOR_THREADGROUP_BARRIER;
  if (g->ended || g->waits) {
    emulator_switch(mine, state.main);
  } else if (g->lanes > 1) {
    go_to(mine, g->order[0]);
  }
}

extern "C" EmulatorMeeting* emulator_meet(unsigned operation, const char* what, const char* file,
                                          unsigned line, unsigned key,
                                          const unsigned char* value) {
  Group* g = state.group;
  unsigned lane = state.lane;
  EmulatorMeeting* m = &g->meeting[g->turn];
  memcpy(m->slot[lane], value, EMULATOR_SLOT);
  uint64_t path = 0;
#if defined(__clang__)
  // One helper called from two branches has one line but two paths.
  void** frame = static_cast<void**>(__builtin_frame_address(0));
  while (frame) {
    path = path * 31 + reinterpret_cast<uint64_t>(frame[1]);
    frame = static_cast<void**>(frame[0]);
  }
#endif
  arrive(Site{operation, line, key, what, file, path});
  state.lane = lane;
  m->lane = lane;
  return m;
}

static void lane_main() {
  for (;;) {
    EmulatorThread t;
    thread_of(state.group_index * EMULATOR_LANES + state.lane, &t);
    state.launch->entry(state.launch->buffers, &t);
    arrive(Site{EMULATOR_RETURN, 0, 0, "the end of the kernel", "", 0});
  }
}

extern "C" void* emulator_shared(unsigned declaration, unsigned bytes) {
  unsigned i = 0;
  while (i < state.shared_count && state.declarations[i] != declaration) i++;
  EmulatorLaunch* l = state.launch;
  uint8_t* piece = l->shared + i * (l->shared_bytes + l->shared_gap);
  if (i == state.shared_count) {
    state.shared_bytes += (bytes + 15u) & ~15u;
    l->shared_used = state.shared_bytes;
    if (i == MAX_SHARED || state.shared_bytes > 32768u) stop(TOO_MUCH_SHARED);
    state.declarations[i] = declaration;
    state.shared_count++;
    memset(piece, int(l->poison), l->shared_bytes);
  }
  return l->shared_at_end ? piece + l->shared_bytes - ((bytes + 15u) & ~15u) : piece;
}

static void prepare_group(unsigned index, unsigned threads) {
  Group* g = &state.groups[index];
  g->lanes = threads - index * EMULATOR_LANES;
  if (g->lanes > EMULATOR_LANES) g->lanes = EMULATOR_LANES;
  g->here = g->cursor = g->turn = 0;
  g->ended = g->waits = false;
  make_order(g->order, g->lanes);
  for (EmulatorMeeting& m : g->meeting) {
    if (g->lanes < EMULATOR_LANES) memset(m.slot, int(state.launch->poison), sizeof m.slot);
    m.present = g->lanes == EMULATOR_LANES ? ~0u : (1u << g->lanes) - 1u;
    m.reduction = state.launch->reduction;
  }
  for (unsigned lane = 0; lane < g->lanes; lane++) {
    unsigned i = index * EMULATOR_LANES + lane;
    // Tops of stacks at different places within a page: else all lanes share few cache lines.
    uint8_t* top = state.launch->stacks + (i + 1) * state.launch->stack_bytes - (i % 61) * 64;
    state.lane_sp[i] = fresh_stack(top, lane_main);
  }
}

static void run_threadgroup(unsigned threads) {
  unsigned groups = (threads + EMULATOR_LANES - 1) / EMULATOR_LANES;
  uint8_t order[MAX_GROUPS];
  state.shared_count = state.shared_bytes = 0;
  for (unsigned i = 0; i < groups; i++) prepare_group(i, threads);
  for (unsigned left = groups; left > 0;) {
    make_order(order, groups);
    for (unsigned i = 0; i < groups; i++) {
      Group* g = &state.groups[order[i]];
      state.group = g;
      state.group_index = order[i];
      g->waits = false;
      go_to(&state.main, g->order[0]);
      if (g->ended) left--;
      // All groups of a threadgroup have to come to the same barrier, or to the end.
      Group* first = &state.groups[order[0]];
      if (g->site.operation != first->site.operation || g->site.line != first->site.line ||
          g->site.path != first->site.path)
        diverge(first->site, g->site);
    }
  }
}

static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGABRT, SIGVTALRM};
enum { SIGNALS = sizeof signals / sizeof signals[0] };
static struct sigaction before[SIGNALS];

static void on_fault(int number, siginfo_t* info, void*) {
  if (!running && number == SIGVTALRM) {
    // The clock runs for the process: pass it on.
    if (!pthread_equal(runner, pthread_self())) pthread_kill(runner, number);
    return;
  }
  if (!running) {  // another thread's fault: put things back, and let it happen again
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], nullptr);
    if (number == SIGABRT) raise(number);  // abort() does not come back to whom it had before
    return;
  }
  if (number == SIGVTALRM) stop(TOO_LONG);
  EmulatorLaunch* l = state.launch;
  l->signal_number = unsigned(number);
  l->address = reinterpret_cast<uint64_t>(info->si_addr);
  bool trapped = number == SIGILL || number == SIGTRAP;
  l->trap = trapped ? trap_number(static_cast<const uint8_t*>(info->si_addr)) : 0;
  stop(FAULTED);
}

static void set_timer(uint64_t milliseconds) {
  itimerval timer = {};
  timer.it_value.tv_sec = time_t(milliseconds / 1000);
  timer.it_value.tv_usec = suseconds_t(milliseconds % 1000 * 1000);
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

static void run_grid() {
  EmulatorLaunch* l = state.launch;
  EmulatorThread* t = &state.common;
  uint64_t total = 1;
  for (int i = 0; i < 3; i++) {
    t->threads_per_grid[i] = l->grid[i];
    t->dispatch_threads_per_threadgroup[i] = l->threadgroup[i];
    t->threadgroups_per_grid[i] = (l->grid[i] - 1) / l->threadgroup[i] + 1;
    total *= t->threadgroups_per_grid[i];
  }
  for (uint64_t i = 0; i < total; i++) {
    uint64_t rest = l->lane_order == REVERSE ? total - 1 - i : i;
    unsigned threads = 1;
    for (int a = 0; a < 3; a++) {
      unsigned at = unsigned(rest % t->threadgroups_per_grid[a]);
      rest /= t->threadgroups_per_grid[a];
      unsigned left = l->grid[a] - at * l->threadgroup[a];
      t->threadgroup_position_in_grid[a] = at;
      t->threads_per_threadgroup[a] = left < l->threadgroup[a] ? left : l->threadgroup[a];
      threads *= t->threads_per_threadgroup[a];
    }
    t->threads_in_threadgroup = threads;
    run_threadgroup(threads);
  }
}

extern "C" __attribute__((visibility("default"))) void emulator_run(EmulatorLaunch* launch) {
  state.launch = launch;
  state.random = 0x9e3779b97f4a7c15ull ^ launch->seed;
  stack_t own = {}, previous = {};
  own.ss_sp = launch->signal_stack;
  own.ss_size = launch->signal_stack_bytes;
  sigaltstack(&own, &previous);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &before[i]);
  runner = pthread_self();
  set_timer(launch->milliseconds);
  unsigned flushed = set_flush(launch->flush);
  running = true;
  if (setjmp(state.leave) == 0) run_grid();
  running = false;
  set_flush(flushed);
  set_timer(0);
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&previous, nullptr);
}
