// SPDX-License-Identifier: Apache-2.0
// Encodings of float32 state for the time between two uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace lockstep::codec {

// quantization: 8 bits that index a map whose values lie close together near zero (block-wise
// dynamic quantization). int8: 8 bits on an even scale. Both have one float32 scale for each
// kBlock elements, their largest magnitude (in quantization with its sign, because the map has 1
// but not -1), which is kept as it is. What was decoded is encoded as it was. lossless: LZ4 on byte
// planes; its size depends on the values, all others' only on their number.
enum class Codec { none, fp16, bf16, int8, quantization, lossless };

// What the values may be: the 8-bit codecs need not spend codes on numbers that do not occur.
enum class Sign { any, non_negative };

inline constexpr int64_t kBlock = 256;

std::string_view name_of(Codec codec);
Codec parse_codec(std::string_view name);  // ConfigError with the list of names
bool is_lossy(Codec codec);

// Bytes for `elements` values, a multiple of 4; not for lossless.
size_t encoded_size(Codec codec, int64_t elements);

// `encoded` has encoded_size() bytes, aligned to 4: the codes, padded to 4 bytes, then the scales.
// The bits depend on the values alone, not on the processor. Values that are not finite stay so in
// none, fp16 and bf16; in int8 and quantization a block that has one decodes to NaN. Any number of
// threads may work on different blocks of kBlock elements: a call covers elements [begin, end) of
// an array of `elements`, where begin is a multiple of kBlock and end too or `elements`; `values`
// is where element `begin` is. Not for lossless.
struct ElementRange {
  int64_t elements;  // of the whole array
  int64_t begin, end;
};
void encode(Codec codec, Sign sign, const float* values, std::byte* encoded, ElementRange range);
void decode(Codec codec, Sign sign, const std::byte* encoded, float* values, ElementRange range);

// Any bytes of `width`-byte elements, and back, exactly. Bytes that do not become smaller are kept
// as they are, with a few bytes more. Error where `packed` is damaged.
std::vector<std::byte> compress(std::span<const std::byte> bytes, size_t width);
// That compress() makes of so many, at most.
size_t compressed_bound(size_t bytes, size_t width);
void decompress(std::span<const std::byte> packed, std::span<std::byte> bytes);

}  // namespace lockstep::codec
