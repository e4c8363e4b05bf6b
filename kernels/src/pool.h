// A small pool of threads for loops of a few microseconds and up.
#pragma once
#include <cstdint>
#include <type_traits>

namespace jaxlm {

int thread_count();

// Calls body(context, i) for every i in [0, count), count <= 65535, on all threads including this one; returns when all
// calls have. Runs on this thread alone if the pool is busy with another loop.
void parallel_for(int64_t count, void (*body)(void* context, int64_t i), void* context);

template <typename F>
void parallel_for(int64_t count, F&& f) {
  using Body = std::remove_reference_t<F>;
  parallel_for(count, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &f);
}

}  // namespace jaxlm
