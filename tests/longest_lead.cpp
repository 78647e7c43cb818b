// Evaluation runs as far ahead of computation as MLX lets it, however busy the machine. Preloaded
// before libmlx and driven by counting.py.
//
// MLX's CPU backend evaluates on the main thread and computes on others; how far the first runs
// ahead, and with it how many buffers are alive, depends on how busy the machine is. Where asked to,
// the others begin no task until the main thread waits: then the count is that of the longest lead
// that MLX allows, the same in every run. To hold back what they release is not enough: of a task
// that is done, the buffers that the main thread lets go of are free at once.

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <utility>

#include "mlx/scheduler.h"

namespace {

std::atomic<bool> main_thread_leads{false}, main_thread_waits{false};

// The state in /proc/PID/stat, which is the main thread's: "PID (name) S ...".
bool main_thread_runs() {
  static const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  char text[128];
  ssize_t length = pread(file, text, sizeof(text) - 1, 0);
  if (length <= 0) return false;
  text[length] = 0;
  const char* name_end = strrchr(text, ')');
  return name_end != nullptr && name_end[1] == ' ' && name_end[2] == 'R';
}

// Once it waits it does so until a task notifies it.
void let_main_thread_lead() {
  if (!main_thread_leads || main_thread_waits) return;
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  while (main_thread_leads && main_thread_runs()) {
    // A kernel that never says that a thread waits must not hang the test.
    if (Clock::now() - begun > std::chrono::seconds(60)) main_thread_leads = false;
    usleep(20);
  }
  main_thread_waits = true;
}

}  // namespace

namespace mlx::core::scheduler {

void Scheduler::enqueue(Stream stream, std::function<void()> task) {
  using Real = void (*)(Scheduler*, Stream, std::function<void()>);
  static const Real real = reinterpret_cast<Real>(dlsym(
      dlopen("libmlx.so", RTLD_LAZY | RTLD_NOLOAD),
      "_ZN3mlx4core9scheduler9Scheduler7enqueueENS0_6StreamESt8functionIFvvEE"));
  real(this, stream, [task = std::move(task)] {
    let_main_thread_lead();
    task();
  });
}

}  // namespace mlx::core::scheduler

void std::condition_variable::notify_all() noexcept {
  using Real = void (*)(std::condition_variable*);
  static const Real real =
      reinterpret_cast<Real>(dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
  main_thread_waits = false;
  real(this);
}

extern "C" void lead(bool on) { main_thread_leads = on; }
