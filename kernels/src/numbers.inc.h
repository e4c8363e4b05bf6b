// Stored numbers to float32, on the lanes of the simd header included before this file.

constexpr int kSegment = 64;  // numbers converted at a time

// count <= kSegment stored numbers -> float32, and zeros up to a multiple of W. Never reads past count.
inline void load_numbers(Type type, const void* data, int64_t first, int count, float* out) {
  if (type == Type::kF32) {
    std::memcpy(out, static_cast<const float*>(data) + first, count * sizeof(float));
    for (int i = count; i % W; ++i) out[i] = 0;
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(data) + first;
  int i = 0;
  for (; i + W <= count; i += W) store(out + i, type == Type::kF16 ? load_f16(p + i) : load_bf16(p + i));
  if (i < count) store(out + i, load_part(type == Type::kF16, p + i, count - i));
}

void to_float(Type type, const void* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kSegment) {
    float block[kSegment + W];
    int n = static_cast<int>(count - i < kSegment ? count - i : kSegment);
    load_numbers(type, data, i, n, block);
    std::memcpy(out + i, block, n * sizeof(float));
  }
}

// Scales or mins of `count` blocks from group0 on, and zeros up to a multiple of W; groups wider than a block repeat theirs.
inline void expand_numbers(const MatJob& job, const void* data, int64_t group0, int count, float* out) {
  if (job.group_shift == 0) return load_numbers(job.scale_type, data, group0, count, out);
  float groups[kSegment + W];
  load_numbers(job.scale_type, data, group0, ((count - 1) >> job.group_shift) + 1, groups);
  for (int i = 0; i < count; ++i) out[i] = groups[i >> job.group_shift];
  for (int i = count; i % W; ++i) out[i] = 0;
}
