// Products of many bfloat16 rows, and attention of many bfloat16 queries, on the matrix unit (AMX).
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

namespace jaxlm {
namespace {
#include "simd_avx512.h"
#include "numbers.inc.h"
#include "attention.inc.h"
#include "flash.inc.h"

constexpr int64_t kTile = 512;      // bfloat16 numbers of a tile: 16 rows of 32
constexpr int64_t kDeep = 4096;     // inputs whose weights are packed at a time: 32 outputs of so many fit the L2 cache
constexpr int64_t kScales = kDeep / kBlock;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 by 16 numbers of 32 bits, in place.
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// Scales or mins of blocks [block, block + count) of row n.
inline void row_numbers(const MatJob& job, const void* data, int64_t n, int64_t block, int64_t count, float* out) {
  const int64_t row = n * (job.K / kBlock >> job.group_shift);
  for (int64_t i = 0; i < count; i += kSegment) {
    float segment[kSegment + W];
    const int part = static_cast<int>(count - i < kSegment ? count - i : kSegment);
    expand_numbers(job, data, row + ((block + i) >> job.group_shift), part, segment);
    std::memcpy(out + i, segment, part * sizeof(float));
  }
}

inline __m512i narrow(const V* wide) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(wide[1], wide[0])); }

// The 32 weights of row n from input k on, as bfloat16. scale and min are those of this block.
inline __m512i block_of(const MatJob& job, int64_t n, int64_t k, float scale, float min) {
  V wide[2];
  const int64_t place = n * job.K + k;
  switch (job.format) {
    case Format::kQ8:
      decode_q8(static_cast<const int8_t*>(job.w) + place, scale, wide);
      return narrow(wide);
    case Format::kQ4:
      decode_q4(static_cast<const uint8_t*>(job.w) + place / 2, scale, min, wide);
      return narrow(wide);
    default:
      return _mm512_loadu_si512(static_cast<const uint16_t*>(job.w) + place);
  }
}

// Outputs [n, n + 16), inputs [k0, k0 + count): tiles of 16 pairs of inputs by 16 outputs, one after the other.
void pack(const MatJob& job, int64_t n, int64_t k0, int64_t count, uint16_t* out) {
  static thread_local float scale[16][kScales], min[16][kScales];
  const int64_t blocks = count / kBlock, block = k0 / kBlock;
  for (int r = 0; job.scale && r < 16; ++r) {
    row_numbers(job, job.scale, n + r, block, blocks, scale[r]);
    if (job.min) row_numbers(job, job.min, n + r, block, blocks, min[r]);
    else for (int64_t i = 0; i < blocks; ++i) min[r][i] = -8 * scale[r][i];
  }
  for (int64_t i = 0; i < blocks; ++i, out += kTile) {
    __m512i rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = block_of(job, n + r, k0 + i * kBlock, scale[r][i], min[r][i]);
    transpose(rows);
    for (int r = 0; r < 16; ++r) _mm512_store_si512(out + 32 * r, rows[r]);
  }
}

// 32 rows of x by 32 outputs (or 16 where one of the two is short), `tiles` steps of 32 inputs.
void multiply(const uint16_t* x, int64_t x_bytes, const uint16_t* w, int64_t w_next, int64_t tiles, float* y,
              int64_t y_bytes, bool tall, bool wide, bool onto) {
  const int64_t below = x_bytes * 8, next = y_bytes * 4;  // sixteen rows further, in numbers
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (onto) {
    _tile_loadd(0, y, y_bytes);
    if (wide) _tile_loadd(1, y + 16, y_bytes);
    if (tall) _tile_loadd(2, y + next, y_bytes);
    if (tall && wide) _tile_loadd(3, y + next + 16, y_bytes);
  }
  for (int64_t i = 0; i < tiles; ++i, x += 32, w += kTile) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (tall) _tile_loadd(5, x + below, x_bytes);
    if (wide) _tile_loadd(7, w + w_next, 64);
    if (wide) _tile_dpbf16ps(1, 4, 7);
    if (tall) _tile_dpbf16ps(2, 5, 6);
    if (tall && wide) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, y_bytes);
  if (wide) _tile_stored(1, y + 16, y_bytes);
  if (tall) _tile_stored(2, y + next, y_bytes);
  if (tall && wide) _tile_stored(3, y + next + 16, y_bytes);
}

// 32 by 32 float32 results, or what there is of them, to bfloat16.
void narrow_results(const float* from, uint16_t* y, int64_t y_row, bool tall, bool wide) {
  for (int64_t i = 0; i < (tall ? 32 : 16); ++i, from += 32, y += y_row) {
    const V both[2] = {load(from), load(from + 16)};
    if (wide) _mm512_storeu_si512(y, narrow(both));
    else _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_castsi512_si256(narrow(both)));
  }
}

void matmul(const MatJob& job, int64_t n0, int64_t n1, float* scratch) {
  alignas(64) static thread_local uint16_t packed[2 * kTile * (kDeep / 32)];
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t n = n0; n < n1; n += 32) {
    const bool wide = n + 32 <= n1;
    float* y = job.y16 ? scratch : job.y + n;
    const int64_t row = job.y16 ? 32 : job.N;
    for (int64_t k = 0; k < job.K; k += kDeep) {
      const int64_t count = job.K - k < kDeep ? job.K - k : kDeep, next = count / 32 * kTile;
      pack(job, n, k, count, packed);
      if (wide) pack(job, n + 16, k, count, packed + next);
      for (int64_t m = 0; m < job.B; m += 32) {
        const bool tall = m + 32 <= job.B;
        multiply(job.x16 + m * job.K + k, job.K * 2, packed, next, count / 32, y + m * row, row * 4, tall, wide, k > 0);
        if (job.y16 && k + count == job.K) narrow_results(y + m * row, job.y16 + m * job.N + n, job.N, tall, wide);
      }
    }
  }
  _tile_release();
}

// The products of one block of queries (see FloatUnit), of bfloat16 numbers with float32 sums.
struct TileUnit {
  const AttnJob& job;
  int64_t kv, padded, width, deep, steps;  // deep: h up to a multiple of 32, in so many steps
  uint16_t *q, *keys, *block_values, *weights;

  template <typename Take>
  TileUnit(const AttnJob& job, int64_t kv, int64_t padded, int64_t width, Take&& take)
      : job(job), kv(kv), padded(padded), width(width), deep((job.h + 31) / 32 * 32), steps(deep / 32) {
    auto halves = [&](int64_t count) { return reinterpret_cast<uint16_t*>(take(count / 2)); };
    q = halves(padded * deep), keys = halves(kSlots * deep);
    block_values = halves(kSlots * width), weights = halves(padded * kSlots);
    std::memset(keys, 0, kSlots * deep * 2);
  }

  // Queries as tiles of 16 pairs of lanes by 16 rows.
  template <typename Place>
  void queries(int64_t rows, Place&& place) {
    for (int64_t r0 = 0; r0 < padded; r0 += 16)
      for (int64_t i = 0; i < steps; ++i) {
        const int64_t lanes = job.h - 32 * i < 32 ? job.h - 32 * i : 32;
        const __mmask32 mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
        __m512i block[16];
        for (int64_t r = 0; r < 16; ++r)
          block[r] = r0 + r < rows ? _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(job.q_stored) + place(r0 + r) + 32 * i)
                                   : _mm512_setzero_si512();
        transpose(block);
        for (int64_t r = 0; r < 16; ++r) _mm512_store_si512(q + (r0 / 16 * steps + i) * kTile + 32 * r, block[r]);
      }
  }

  // Lanes [d, d + 16) of token i, as bfloat16; zero past the block's tokens and past h.
  __m256i lanes(const KeyBlock& block, const void* from, int64_t i, int64_t d) const {
    if (i >= block.count || d >= job.h) return _mm256_setzero_si256();
    const __mmask16 mask = job.h - d < 16 ? (1u << (job.h - d)) - 1 : 0xffff;
    const int64_t place = block.place(job, kv, i) + d;
    if (block.type == Type::kBF16) return _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + place);
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + place)));
  }

  // Keys as rows; values as tiles of 16 pairs of tokens by 16 lanes.
  void load(const KeyBlock& block) const {
    for (int64_t i = 0; i < block.count; ++i)
      for (int64_t d = 0; d < deep; d += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + i * deep + d), lanes(block, block.k, i, d));
    for (int64_t i = 0; i < kSlots; i += 2)
      for (int64_t d = 0; d < width; d += 16) {
        const __m512i even = _mm512_cvtepu16_epi32(lanes(block, block.v, i, d));
        const __m512i odd = _mm512_cvtepu16_epi32(lanes(block, block.v, i + 1, d));
        _mm512_store_si512(block_values + (d / 16 * 2 + i / 32) * kTile + i % 32 / 2 * 32,
                           _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
  }

  void scores(float* out) const {
    for (int64_t key = 0; key < kSlots; key += 32)
      for (int64_t r = 0; r < padded; r += 32)
        multiply(keys + key * deep, deep * 2, q + r / 16 * steps * kTile, steps * kTile, steps, out + key * padded + r,
                 padded * 4, true, r + 32 <= padded, false);
    for (int64_t i = 0; i < kSlots * padded; ++i) out[i] *= job.scale;
  }

  void mix(const float* scores, int64_t count, float* values) const {
    for (int64_t r = 0; r < padded; r += 16)
      for (int64_t key = 0; key < kSlots; key += 16) {
        __m512i block[16];
        for (int64_t i = 0; i < 16; ++i) block[i] = _mm512_loadu_si512(scores + (key + i) * padded + r);
        transpose(block);
        for (int64_t i = 0; i < 16; ++i)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + (r + i) * kSlots + key),
                              reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(block[i]))));
      }
    for (int64_t r = 0; r < padded; r += 32)
      for (int64_t d = 0; d < width; d += 32)
        multiply(weights + r * kSlots, kSlots * 2, block_values + d / 16 * 2 * kTile, 2 * kTile, (count + 31) / 32,
                 values + r * width + d, width * 4, r + 32 <= padded, d + 32 <= width, true);
  }
};

void attend_block(const AttnJob& job, int64_t b, int64_t kv, int64_t t0, int64_t t1, float* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  attend_queries<TileUnit>(job, b, kv, t0, t1, scratch);
  _tile_release();
}

}  // namespace

const MatrixUnit* amx_unit() {
  static constexpr MatrixUnit unit{matmul, attend_block};
  return &unit;
}
}  // namespace jaxlm
#else
const jaxlm::MatrixUnit* jaxlm::amx_unit() { return nullptr; }
#endif
