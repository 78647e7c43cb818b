// Counts the buffers that MLX holds, from inside its process. counting.py compiles and loads this.
//
// MLX allocates through one object with virtual functions. `counted_install` gives that object
// another table of them, in which malloc and free count before and after they call MLX's own. It
// works with any backend whose buffers all come from there: Metal and the CPU; CUDA has another way.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "mlx/allocator.h"

namespace {

using mlx::core::allocator::Allocator;
using mlx::core::allocator::Buffer;

// Never destroyed: MLX frees buffers while the process ends.
std::mutex& lock = *new std::mutex;
auto& sizes = *new std::unordered_map<void*, size_t>;
int64_t peak = 0, bytes = 0, peak_bytes = 0;

Buffer (*mlx_malloc)(Allocator*, size_t) = nullptr;
void (*mlx_free)(Allocator*, Buffer) = nullptr;

Buffer counting_malloc(Allocator* allocator, size_t size) {
  Buffer buffer = mlx_malloc(allocator, size);
  if (buffer.ptr() != nullptr) {
    std::lock_guard<std::mutex> guard(lock);
    sizes[buffer.ptr()] = size;
    peak = std::max<int64_t>(peak, sizes.size());
    peak_bytes = std::max<int64_t>(peak_bytes, bytes += size);
  }
  return buffer;
}

void counting_free(Allocator* allocator, Buffer buffer) {
  {
    // Before the real release: the address may be handed out again at once.
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes.find(buffer.ptr());
    if (found != sizes.end()) {  // not one from before the count began
      bytes -= found->second;
      sizes.erase(found);
    }
  }
  mlx_free(allocator, buffer);
}

// Where a virtual function stands in the table, which a pointer to it says (Itanium C++ ABI and
// Apple's for arm64): its offset in bytes, plus 1 on x86-64.
template <typename Function>
size_t slot_of(Function function) {
  uintptr_t offset;
  std::memcpy(&offset, &function, sizeof(offset));
  return (offset & ~uintptr_t{1}) / sizeof(void*);
}

}  // namespace

extern "C" {

// The library of MLX that this process has loaded. Returns what is missing, or null.
const char* counted_install(const char* mlx_library) {
  if (mlx_malloc != nullptr) return nullptr;
  void* library = dlopen(mlx_library, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "its library is not loaded";
  void* symbol = dlsym(library, "_ZN3mlx4core9allocator9allocatorEv");
  if (symbol == nullptr) return "it has no mlx::core::allocator::allocator()";

  Allocator& allocator = reinterpret_cast<Allocator& (*)()>(symbol)();
  const size_t malloc_slot = slot_of<Buffer (Allocator::*)(size_t)>(&Allocator::malloc);
  const size_t free_slot = slot_of<void (Allocator::*)(Buffer)>(&Allocator::free);
  void*** table = reinterpret_cast<void***>(&allocator);

  // Two entries precede the functions: the offset to the top and the type.
  static std::array<void*, 2 + 16> copy;
  std::copy_n(*table - 2, copy.size(), copy.begin());
  mlx_malloc = reinterpret_cast<decltype(mlx_malloc)>(copy[2 + malloc_slot]);
  mlx_free = reinterpret_cast<decltype(mlx_free)>(copy[2 + free_slot]);
  copy[2 + malloc_slot] = reinterpret_cast<void*>(counting_malloc);
  copy[2 + free_slot] = reinterpret_cast<void*>(counting_free);
  *table = copy.data() + 2;
  return nullptr;
}

int64_t counted_live() {
  std::lock_guard<std::mutex> guard(lock);
  return sizes.size();
}

int64_t counted_peak() {
  std::lock_guard<std::mutex> guard(lock);
  return peak;
}

int64_t counted_peak_bytes() {
  std::lock_guard<std::mutex> guard(lock);
  return peak_bytes;
}

void counted_reset() {
  std::lock_guard<std::mutex> guard(lock);
  peak = sizes.size();
  peak_bytes = bytes;
}
}
