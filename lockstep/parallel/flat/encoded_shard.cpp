// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/encoded_shard.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/core/float16.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/memory/threads/parallel_for.h"

namespace lockstep::parallel::detail {
namespace {

constexpr int64_t kChunk = 2048;         // elements decoded at a time
constexpr int64_t kGrain = 32 * kChunk;  // of a thread
static_assert(kChunk % codec::kBlock == 0);

// body(begin, count) for chunks of so many elements, on torch's threads.
template <class Body>
void for_each_chunk(int64_t elements, const Body& body) {
  const int64_t grains = (elements + kGrain - 1) / kGrain;
  memory::parallel_for(grains, 1, [&](int64_t first, int64_t end) {
    const int64_t last = std::min(end * kGrain, elements);
    for (int64_t begin = first * kGrain; begin < last; begin += kChunk)
      body(begin, std::min(kChunk, last - begin));
  });
}

// Elements of 16 bits from `at` on.
template <class T>
void narrow_into(const float* values, std::byte* memory, int64_t at, int64_t count) {
  T* const to = reinterpret_cast<T*>(memory) + at;
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(values[i]);
}
void narrow_into(at::ScalarType dtype, const float* values, std::byte* memory, int64_t at,
                 int64_t count) {
  if (dtype == at::kHalf) return narrow_into<Half>(values, memory, at, count);
  narrow_into<BFloat16>(values, memory, at, count);
}

// Where an element is no longer its rounded master it was written, and is the master.
template <class T>
void take_written(const std::byte* memory, int64_t at, float* master, int64_t count) {
  const T* const now = reinterpret_cast<const T*>(memory) + at;
  const auto bits = [](T value) { return std::bit_cast<uint16_t>(value); };
  for (int64_t i = 0; i < count; ++i) {
    if (bits(narrow<T>(master[i])) != bits(now[i])) master[i] = widen(now[i]);
  }
}

bool is_half(at::ScalarType dtype) {
  check(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
        "encoded parameters are float32 or have 16 bits");
  return dtype != at::kFloat;
}

}  // namespace

EncodedBlock encoded_block(const FlatParameter& parameter, int rank) {
  const FlatPlan& plan = parameter.plan();
  const FlatOffload& offload = *plan.offload;
  const auto part = static_cast<size_t>(rank);
  EncodedBlock block;
  const auto add = [&](layout::Range range, bool embedding) {
    const auto codec = layout::weight_codec(offload.param_codec, range.size(), embedding);
    if (codec == codec::Codec::lossless) {
      block.tensors.push_back({.range = range, .codec = codec});
      return;
    }
    const auto layout = codec::coded_layout(codec, range.size());
    block.tensors.push_back({.range = range,
                             .codec = codec,
                             .codes = block.code_bytes,
                             .scales = block.code_bytes + layout.scales,
                             .remainder = block.remainder_bytes});
    block.code_bytes += layout.remainder;
    block.remainder_bytes += layout.total - layout.remainder;
  };
  const layout::Range whole = parameter.layout().blocks[part];
  if (plan.updates_as_one) {
    const auto& embeddings = offload.embeddings;
    const bool any = std::find(embeddings.begin(), embeddings.end(), true) != embeddings.end();
    if (whole.size() > 0) add({0, whole.size()}, any);
    return block;
  }
  for (const layout::RowShard& shard : parameter.layout().rows[part]) {
    const auto index = static_cast<size_t>(shard.tensor);
    const Member& member = parameter.members()[index];
    const int64_t begin = member.offset + shard.rows.begin * member.row_size - whole.begin;
    const int64_t count = shard.rows.size() * member.row_size;
    if (count > 0) add({begin, begin + count}, offload.embeddings[index]);
  }
  return block;
}

EncodedShard::EncodedShard(const FlatParameter& parameter, at::Tensor codes, at::Tensor remainders)
    : plan_(parameter.plan()),
      codec_(plan_.offload->param_codec),
      block_(encoded_block(parameter, plan_.shard.rank())),
      codes_(std::move(codes)),
      remainders_(std::move(remainders)) {
  const int64_t count = parameter.block().size();
  range_ = std::make_shared<memory::AddressRange>(
      static_cast<size_t>(count) * c10::elementSize(plan_.dtype),
      memory::AddressRange::Access::read_write);
  const std::array<int64_t, 1> sizes{count};
  values_ = at::from_blob(
      range_->data(), sizes, [range = range_](void*) {}, at::TensorOptions().dtype(plan_.dtype));
  if (is_lossless()) {
    packed_.emplace(codes_, count, plan_.dtype, *plan_.offload->tiers,
                    "parameters of " + plan_.name);
  }
}

codec::CodedArray EncodedShard::array(const EncodedTensor& tensor) const {
  auto* const codes = static_cast<std::byte*>(codes_.data_ptr());
  const bool scaled = codec::scales_size(tensor.codec, tensor.range.size()) > 0;
  return {.codec = tensor.codec,
          .codes = codes + tensor.codes,
          .scales = scaled ? reinterpret_cast<float*>(codes + tensor.scales) : nullptr,
          .remainder = static_cast<int8_t*>(remainders_.data_ptr()) + tensor.remainder};
}

void EncodedShard::decode(const EncodedTensor& tensor, const std::byte* codes, int64_t begin,
                          int64_t count, at::ScalarType dtype, std::byte* line) {
  const bool half = is_half(dtype);
  // Only ever read.
  auto* const from = const_cast<std::byte*>(codes);
  const bool scaled = codec::scales_size(tensor.codec, tensor.range.size()) > 0;
  const codec::CodedArray array{
      .codec = tensor.codec,
      .codes = from + tensor.codes,
      .scales = scaled ? reinterpret_cast<float*>(from + tensor.scales) : nullptr};
  for (int64_t at = begin; at < begin + count; at += kChunk) {
    const int64_t size = std::min(kChunk, begin + count - at);
    if (dtype == at::kBFloat16 && tensor.codec == codec::Codec::bf16) {
      std::memcpy(line + 2 * (at - begin), array.from(at).codes, static_cast<size_t>(2 * size));
    } else if (half) {
      alignas(64) float values[kChunk];
      codec::decode_codes(array.from(at), values, size);
      narrow_into(dtype, values, line, at - begin, size);
    } else {
      codec::decode_codes(array.from(at), reinterpret_cast<float*>(line) + (at - begin), size);
    }
  }
}

void EncodedShard::decode_all(at::ScalarType dtype, std::byte* line) const {
  if (packed_) return packed_->view().read_all(dtype, line);
  const size_t width = c10::elementSize(dtype);
  for (const EncodedTensor& tensor : block_.tensors) {
    decode(tensor, static_cast<const std::byte*>(codes_.data_ptr()), 0, tensor.range.size(), dtype,
           line + static_cast<size_t>(tensor.range.begin) * width);
  }
}

void EncodedShard::open() {
  if (open_) return;
  open_ = true;
  range_->set_access(memory::AddressRange::Access::read_write);
  if (packed_) return decode_all(plan_.dtype, range_->data());
  const bool half = is_half(plan_.dtype);
  for (const EncodedTensor& tensor : block_.tensors) {
    const codec::CodedArray all = array(tensor);
    for_each_chunk(tensor.range.size(), [&](int64_t begin, int64_t count) {
      const int64_t at = tensor.range.begin + begin;
      if (!half) return codec::join(all.from(begin), values_.data_ptr<float>() + at, count);
      alignas(64) float master[kChunk];
      codec::join(all.from(begin), master, count);
      narrow_into(plan_.dtype, master, range_->data(), at, count);
    });
  }
}

void EncodedShard::encode_all() {
  const bool half = is_half(plan_.dtype);
  for (const EncodedTensor& tensor : block_.tensors) {
    const codec::CodedArray all = array(tensor);
    for_each_chunk(tensor.range.size(), [&](int64_t begin, int64_t count) {
      const int64_t at = tensor.range.begin + begin;
      if (!half) return codec::split(values_.data_ptr<float>() + at, all.from(begin), count);
      alignas(64) float master[kChunk];
      codec::join(all.from(begin), master, count);
      if (plan_.dtype == at::kHalf) {
        take_written<Half>(range_->data(), at, master, count);
      } else {
        take_written<BFloat16>(range_->data(), at, master, count);
      }
      codec::split(master, all.from(begin), count);
    });
  }
}

void EncodedShard::settle() {
  if (!open_) return;
  if (written_) packed_ ? packed_->write(range_->data()) : encode_all();
  range_->set_access(memory::AddressRange::Access::none);
  open_ = written_ = false;
}

size_t EncodedShard::bytes() const {
  return packed_ ? packed_->bytes() : block_.code_bytes + block_.remainder_bytes;
}

size_t EncodedShard::plain_bytes() const {
  size_t bytes = 0;
  // A lossy codec's is the whole master, of which other parameters have a part in their state.
  const size_t width = is_lossless() ? c10::elementSize(plan_.dtype) : sizeof(float);
  for (const EncodedTensor& tensor : block_.tensors)
    bytes += static_cast<size_t>(tensor.range.size()) * width;
  return bytes;
}

}  // namespace lockstep::parallel::detail
