// Counts the buffers that MLX holds. Preloaded before libmlx, this `allocator()` is found first and
// wraps the real one; every allocation and release passes through. Read by counting_allocator.py.
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
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/scheduler.h"

namespace {

using mlx::core::allocator::Allocator;
using mlx::core::allocator::Buffer;

std::atomic<bool> main_thread_leads{false}, main_thread_waits{false};
std::atomic<int64_t> live{0}, peak{0}, live_bytes{0}, peak_bytes{0};

void raise_to(std::atomic<int64_t>& top, int64_t value) {
  int64_t seen = top.load();
  while (seen < value && !top.compare_exchange_weak(seen, value)) {
  }
}

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

class Counting : public Allocator {
 public:
  explicit Counting(Allocator& real) : real_(real) {}

  Buffer malloc(size_t size) override {
    Buffer buffer = real_.malloc(size);
    if (buffer.ptr() != nullptr) {
      std::lock_guard<std::mutex> guard(lock_);
      sizes_[buffer.ptr()] = size;
      raise_to(peak, ++live);
      raise_to(peak_bytes, live_bytes += size);
    }
    return buffer;
  }

  void free(Buffer buffer) override {
    {
      // Before the real release: the address may be handed out again at once.
      std::lock_guard<std::mutex> guard(lock_);
      auto found = sizes_.find(buffer.ptr());
      if (found != sizes_.end()) {
        --live;
        live_bytes -= found->second;
        sizes_.erase(found);
      }
    }
    real_.free(buffer);
  }

  size_t size(Buffer buffer) const override { return real_.size(buffer); }
  Buffer make_buffer(void* ptr, size_t size) override { return real_.make_buffer(ptr, size); }
  void release(Buffer buffer) override { real_.release(buffer); }

 private:
  Allocator& real_;
  std::mutex lock_;
  std::unordered_map<void*, size_t> sizes_;
};

}  // namespace

namespace mlx::core::allocator {

Allocator& allocator() {
  using Real = Allocator& (*)();
  // Python loads libmlx out of the global scope, so the next definition is asked of it by name.
  static Counting* counting = [] {
    void* library = dlopen("libmlx.so", RTLD_LAZY | RTLD_NOLOAD);
    return new Counting(
        reinterpret_cast<Real>(dlsym(library, "_ZN3mlx4core9allocator9allocatorEv"))());
  }();
  return *counting;
}

}  // namespace mlx::core::allocator

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

extern "C" {

int64_t counted_live() { return live; }
int64_t counted_peak() { return peak; }
int64_t counted_peak_bytes() { return peak_bytes; }
void counted_lead(bool on) { main_thread_leads = on; }
void counted_reset() {
  peak = live.load();
  peak_bytes = live_bytes.load();
}
}
