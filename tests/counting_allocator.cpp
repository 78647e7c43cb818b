// Counts the buffers that MLX holds. Preloaded before libmlx, this `allocator()` is found first and
// wraps the real one; every allocation and release passes through. Read by counting_allocator.py.

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "mlx/allocator.h"

namespace {

using mlx::core::allocator::Allocator;
using mlx::core::allocator::Buffer;

std::atomic<int64_t> live{0}, peak{0}, live_bytes{0}, peak_bytes{0};

void raise_to(std::atomic<int64_t>& top, int64_t value) {
  int64_t seen = top.load();
  while (seen < value && !top.compare_exchange_weak(seen, value)) {
  }
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

extern "C" {

int64_t counted_live() { return live; }
int64_t counted_peak() { return peak; }
int64_t counted_peak_bytes() { return peak_bytes; }
void counted_reset() {
  peak = live.load();
  peak_bytes = live_bytes.load();
}
}
