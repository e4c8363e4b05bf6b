// Small helpers the handlers share: every dimension and dtype is checked here again, so that no call reads out of bounds.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxlm {

namespace ffi = xla::ffi;
using Dims = ffi::AnyBuffer::Dimensions;
using Index = ffi::Buffer<ffi::S32, 0>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Floats = ffi::Buffer<ffi::F32, 1>;

inline ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("jaxlm_cpu: " + what); }

inline bool float_type(ffi::DataType dtype, Type* out) {
  if (dtype == ffi::F32) *out = Type::kF32;
  else if (dtype == ffi::BF16) *out = Type::kBF16;
  else if (dtype == ffi::F16) *out = Type::kF16;
  else return false;
  return true;
}

inline int64_t type_bytes(Type type) { return type == Type::kF32 ? 4 : 2; }

template <typename Buffer>
bool dims_are(const Buffer& buffer, std::initializer_list<int64_t> dims) {
  const Dims have = buffer.dimensions();
  return have.size() == dims.size() && std::equal(dims.begin(), dims.end(), have.begin());
}

// The trailing `rank` dims of a buffer that may have one more in front, of which `layer` picks one.
struct Stacked {
  const char* data = nullptr;
  std::vector<int64_t> dims;

  ffi::Error init(const ffi::AnyBuffer& buffer, size_t rank, int64_t layer, int64_t item_bytes) {
    const Dims have = buffer.dimensions();
    if (have.size() != rank && have.size() != rank + 1) return invalid("an operand has the wrong number of dimensions");
    const int64_t layers = have.size() == rank ? 1 : have[0];
    if (layer < 0 || layer >= layers)
      return invalid("layer " + std::to_string(layer) + " of a stack of " + std::to_string(layers));
    dims.assign(have.end() - rank, have.end());
    int64_t count = 1;
    for (int64_t d : dims) count *= d;
    data = static_cast<const char*>(buffer.untyped_data()) + layer * count * item_bytes;
    return ffi::Error::Success();
  }
};

// Grows and is kept: one per thread and use, aligned for vectors.
class Scratch {
 public:
  template <typename T>
  T* get(int64_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
      size_ = data_ ? bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return static_cast<T*>(data_);
  }
  ~Scratch() { std::free(data_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

constexpr int64_t kDecodeRows = 32;  // Calls with more rows are long, and often belong to a prompt.

// Calls f(i) for every i in [0, count) on XLA's threads and this one; returns when all calls have. For long loops among
// XLA's own, as a prompt has them: the pool of pool.h answers faster, but would compete with XLA's for the cores.
template <typename F>
void on_xla_threads(ffi::ThreadPool& threads, int64_t count, F&& f) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  const auto drain = [state, count, &f] {  // One that starts late finds no index left, and does not touch f.
    for (int64_t i; (i = state->next.fetch_add(1)) < count; state->done.fetch_add(1)) f(i);
  };
  const int64_t helpers = std::min<int64_t>(threads.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([drain] { drain(); });
  drain();
  while (state->done.load() < count) std::this_thread::yield();
}

}  // namespace jaxlm
