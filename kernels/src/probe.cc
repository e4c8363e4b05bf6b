// Plain C entry points, called through ctypes.
#include <sys/mman.h>

#include <chrono>
#include <cstring>

#include "kernels.h"
#include "pool.h"

using namespace jaxlm;

extern "C" const char* jaxlm_cpu_isa() { return kernels().name; }
extern "C" int jaxlm_cpu_matrix_unit() { return jaxlm::matrix_unit() != nullptr; }

extern "C" int jaxlm_cpu_threads() { return thread_count(); }

// Best rate, in bytes per second, at which all threads read a buffer of `bytes`; passes repeat until `seconds` are over
// (two at least). 0 if the memory is not to be had.
extern "C" double jaxlm_cpu_read_bandwidth(int64_t bytes, double seconds) {
  constexpr int64_t kChunk = 1 << 20;
  const int64_t chunks = bytes / kChunk;
  if (chunks < 1 || chunks > 0xffff) return 0;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  float* data = static_cast<float*>(memory);
  constexpr int64_t kFloats = kChunk / sizeof(float);
  parallel_for(chunks, [&](int64_t i) { std::memset(data + i * kFloats, 0, kChunk); });
  double best = 0, spent = 0;
  volatile float sink = 0;
  for (int pass = 0; pass < 2 || spent < seconds; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(chunks, [&](int64_t i) { if (kernels().read(data + i * kFloats, kFloats) != 0) sink = 1; });
    const double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    spent += time;
    best = chunks * kChunk / time > best ? chunks * kChunk / time : best;
  }
  munmap(memory, bytes);
  return best;
}
