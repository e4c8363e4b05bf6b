// What the handlers hand to the kernels, and the table of kernels one instruction set provides.
#pragma once
#include <cstdint>

namespace jaxlm {

enum class Type : int { kF32, kBF16, kF16 };
enum class Format : int { kF32, kBF16, kF16, kQ8, kQ4 };

constexpr int kBlock = 32;  // weights are decoded 32 at a time; also the finest scale group

// x as integers in blocks of 32, in the order the integer kernels read (see vnni.inc.h).
struct QuantX {
  int pieces = 1;                // bytes per integer: 1, or 3 for results as exact as float32's
  const char* stream = nullptr;  // bytes, scales and corrections
  const float* sums = nullptr;   // [B, blocks rounded up to 16]: sum of x over each block
};

// y[b, n] = sum_k x[b, k] * W[n, k] for one matrix.
struct MatJob {
  Format format = Format::kF32;
  Type scale_type = Type::kF32;
  int group_shift = 0;  // log2(scale group / 32)
  int64_t B = 0, N = 0, K = 0;
  const void* w = nullptr;       // [N, K] in its stored form
  const void* scale = nullptr;   // [N, K / group]
  const void* min = nullptr;     // [N, K / group], or null: 4-bit values are then scale * (q - 8)
  const float* x = nullptr;      // as pack_x left it
  const QuantX* xq = nullptr;    // set: use the integer kernels
  const uint16_t* x16 = nullptr; // x in bfloat16, for Matmul
  float* y = nullptr;            // [B, N]
  uint16_t* y16 = nullptr;       // or in bfloat16, for Matmul
};

struct AttnJob {
  Type cache_type = Type::kF32, q_type = Type::kF32, new_type = Type::kF32;
  int64_t B = 0, T = 1, S = 0, K = 0, H = 0, h = 0;
  float scale = 1, softcap = 0;    // softcap 0: off
  int64_t window = 0, chunk = 0;   // 0: off
  const int32_t* lengths = nullptr;  // [B]: positions stored; query t of row b is at lengths[b] + t
  const void* q_stored = nullptr;  // [B, T, H, h]
  const void* k_stored = nullptr;  // [B, T, K, h]
  const void* v_stored = nullptr;
  const float* q = nullptr;        // the same in float32, q scaled: for attend and attend_merge
  const float* k_new = nullptr;
  const float* v_new = nullptr;
  const float* sinks = nullptr;    // [H] or null
  const void* k = nullptr;         // [B, S, K, h]
  const void* v = nullptr;
  float* out = nullptr;            // [B, T, H, h]

  // The first position that a query at position p sees.
  int64_t lowest(int64_t p) const {
    int64_t low = window > 0 && p >= window ? p - window + 1 : 0;
    return chunk > 0 && p - p % chunk > low ? p - p % chunk : low;
  }

  // The last position from which a query sees position p.
  int64_t highest(int64_t p) const {
    int64_t high = window > 0 ? p + window - 1 : int64_t{1} << 40;
    return chunk > 0 && p - p % chunk + chunk - 1 < high ? p - p % chunk + chunk - 1 : high;
  }
};

// Floats one attend() call needs for its unnormalised result: per query head the running maximum, the sum, and h values.
inline int64_t part_floats(const AttnJob& a) { return a.H * (a.h + 2); }

constexpr int kSlots = 64;  // slots per softmax update
inline int64_t scratch_floats(const AttnJob& a) { return kSlots * (a.H + a.h); }

// Queries per call of attend_block, and the floats it needs: see QueryBlock and its units.
constexpr int64_t kQueryRows = 192;
inline int64_t query_block(const AttnJob& a) { const int64_t t = kQueryRows * a.K / a.H; return t < 8 ? 8 : t; }
inline int64_t block_floats(const AttnJob& a) {
  const int64_t rows = (query_block(a) * (a.H / a.K) + 15) / 16 * 16, width = (a.h + 15) / 16 * 16;
  return rows * (2 * width + 2 * kSlots + 48) + 3 * kSlots * width;
}

struct Kernels {
  const char* name;
  void (*to_float)(Type type, const void* data, int64_t count, float* out);
  // x [B, K] -> B * round_up(K, 32) floats in the order the kernels read: [pass, block, row, 32].
  void (*pack_x)(Format format, const float* x, int64_t B, int64_t K, float* out);
  void (*matvec)(const MatJob& job, int64_t n0, int64_t n1);  // rows [n0, n1) of W
  // The integer kernels, for 8 and 4 bits: null where the instruction set has no integer dot product.
  int64_t (*quantized_bytes)(Format format, int64_t B, int64_t K, int pieces);
  void (*quantize_x)(Format format, const float* x, int64_t B, int64_t K, int pieces, char* stream, float* sums);
  void (*matvec_int)(const MatJob& job, int64_t n0, int64_t n1);
  // Positions [p0, p1) of row b (slot = position mod S) -> part; merge adds the new token, sinks and normalises.
  void (*attend)(const AttnJob& job, int64_t b, int64_t p0, int64_t p1, float* part, float* scratch);
  void (*attend_merge)(const AttnJob& job, int64_t b, const float* parts, int64_t count);
  // Queries t0 .. t1 - 1 of row b, all heads that share key head kv, over everything they see.
  void (*attend_block)(const AttnJob& job, int64_t b, int64_t kv, int64_t t0, int64_t t1, float* scratch);
  float (*read)(const float* p, int64_t count);  // touches every value; for the bandwidth probe
};

// What a matrix unit does for bfloat16.
struct MatrixUnit {
  // Outputs [n0, n1) of a product. B and n1 - n0 are multiples of kTileSide, K of 32; weights are bfloat16 or quantised.
  // scratch: B * 32 floats.
  void (*matmul)(const MatJob& job, int64_t n0, int64_t n1, float* scratch);
  void (*attend_block)(const AttnJob& job, int64_t b, int64_t kv, int64_t t0, int64_t t1, float* scratch);
};
constexpr int64_t kTileSide = 16;
const MatrixUnit* amx_unit();     // null when not compiled in
const MatrixUnit* matrix_unit();  // null where this machine has none, or JAXLM_CPU_ISA asks for less

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null when not compiled in
const Kernels* avx512_kernels();  // null when not compiled in
const Kernels& kernels();         // the best one this machine runs; JAXLM_CPU_ISA=portable|avx2|avx512 asks for another

}  // namespace jaxlm
