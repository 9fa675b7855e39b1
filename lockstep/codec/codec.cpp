// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/codec.h"

#include <algorithm>
#include <array>

#include "lockstep/codec/dynamic_map.h"
#include "lockstep/codec/kernels.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::codec {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"none", "fp16",         "bf16",
                                                    "int8", "quantization", "lossless"};

constexpr DynamicMap kAny = make_dynamic_map(true);
constexpr DynamicMap kNonNegative = make_dynamic_map(false);

bool has_scales(Codec codec) { return codec == Codec::int8 || codec == Codec::quantization; }

size_t code_size(Codec codec) {
  switch (codec) {
    case Codec::none:
      return 4;
    case Codec::fp16:
    case Codec::bf16:
      return 2;
    default:
      return 1;
  }
}

size_t code_bytes(Codec codec, int64_t elements) {
  return (static_cast<size_t>(elements) * code_size(codec) + 3) / 4 * 4;
}

void check_range(Codec codec, const ElementRange& range) {
  check(codec != Codec::lossless, "lossless has no blocks: compress() and decompress()");
  check(range.begin % kBlock == 0 && (range.end % kBlock == 0 || range.end == range.elements) &&
            0 <= range.begin && range.begin <= range.end && range.end <= range.elements,
        "parts of an encoded array begin and end at blocks");
}

// Where a range's scales are; null for codecs without.
template <class Float, class Byte>
Float* scales_at(Codec codec, Byte* encoded, const ElementRange& range) {
  if (!has_scales(codec)) return nullptr;
  return reinterpret_cast<Float*>(encoded + code_bytes(codec, range.elements)) +
         range.begin / kBlock;
}

}  // namespace

namespace detail {

const Kernels& kernels() {
#ifdef __x86_64__
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c");
  if (has_v3) return x86_v3::kKernels;
#endif
  return baseline::kKernels;
}

const DynamicMap& map_of(Sign sign) { return sign == Sign::any ? kAny : kNonNegative; }

}  // namespace detail

std::string_view name_of(Codec codec) { return kNames.at(static_cast<size_t>(codec)); }

Codec parse_codec(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) {
    throw ConfigError(format("[codec] '{}' is unknown, must be one of {}", name, join(kNames)));
  }
  return static_cast<Codec>(found - kNames.begin());
}

bool is_lossy(Codec codec) { return codec != Codec::none && codec != Codec::lossless; }

size_t encoded_size(Codec codec, int64_t elements) {
  check(codec != Codec::lossless, "the size that lossless takes depends on the values");
  const auto blocks = static_cast<size_t>((elements + kBlock - 1) / kBlock);
  return code_bytes(codec, elements) + (has_scales(codec) ? blocks * sizeof(float) : 0);
}

void encode(Codec codec, Sign sign, const float* values, std::byte* encoded, ElementRange range) {
  check_range(codec, range);
  const auto offset = static_cast<size_t>(range.begin) * code_size(codec);
  detail::kernels().encode(codec, sign)(values, encoded + offset,
                                        scales_at<float>(codec, encoded, range),
                                        range.end - range.begin, detail::map_of(sign));
}

void decode(Codec codec, Sign sign, const std::byte* encoded, float* values, ElementRange range) {
  check_range(codec, range);
  const auto offset = static_cast<size_t>(range.begin) * code_size(codec);
  detail::kernels().decode(codec, sign)(encoded + offset,
                                        scales_at<const float>(codec, encoded, range), values,
                                        range.end - range.begin, detail::map_of(sign));
}

}  // namespace lockstep::codec
