#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace jaxlm {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#else
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
#endif

const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* asked = std::getenv("JAXLM_CPU_ISA");
  auto allowed = [&](const char* name) { return !asked || !*asked || !std::strcmp(asked, name); };
  if (allowed("avx512") && runs_avx512() && avx512_kernels()) return *avx512_kernels();
  if (allowed("avx2") && runs_avx2() && avx2_kernels()) return *avx2_kernels();
  return *portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace jaxlm
