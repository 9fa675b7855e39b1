// SPDX-License-Identifier: Apache-2.0
// A rank's part of a flat whose parameters are encoded where they rest, in host memory.
//
// Lossy codecs keep a float32 master in two parts (codec/master.h): codes, which models compute
// with and peers read, and remainders. Lossless keeps the values as LZ4 makes them, which peers
// read too. The values themselves have addresses of their own, with memory behind them only while
// someone reads or writes them: from open() to settle(). Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/codec/master.h"
#include "lockstep/memory/arena.h"
#include "lockstep/parallel/flat/flat_parameter.h"
#include "lockstep/parallel/tiers/packed_values.h"

namespace lockstep::parallel::detail {

// A tensor that the optimizer updates, in what its rank sends.
struct EncodedTensor {
  layout::Range range;  // elements of the rank's block
  codec::Codec codec;
  size_t codes = 0, scales = 0, remainder = 0;  // bytes; remainders are in memory of their own
};
struct EncodedBlock {
  std::vector<EncodedTensor> tensors;
  size_t code_bytes = 0, remainder_bytes = 0;  // of lossy codecs
};
// The block of one rank of the flat's group.
EncodedBlock encoded_block(const FlatParameter& parameter, int rank);

class EncodedShard {
 public:
  // `codes`: memory that peers read, of PackedValues for lossless. `remainders`: this rank's alone.
  EncodedShard(const FlatParameter& parameter, at::Tensor codes, at::Tensor remainders);
  EncodedShard(const EncodedShard&) = delete;
  EncodedShard& operator=(const EncodedShard&) = delete;

  // 1-d, in the type of the shard. Its memory is there between open() and settle().
  const at::Tensor& values() const { return values_; }
  // By the thread that computes, or by an update that it waits for.
  void open();
  void note_written() { written_ = true; }
  // What was written is encoded. A master that still rounds to its value stays.
  void settle();

  bool is_lossless() const { return codec_ == codec::Codec::lossless; }
  const EncodedBlock& block() const { return block_; }
  codec::CodedArray array(const EncodedTensor& tensor) const;
  const at::Tensor& codes() const { return codes_; }

  // What the model computes with, as `line`'s type, for elements [begin, begin + count) of a tensor
  // whose codes are at `codes`; `begin` is a multiple of kBlock. Thread safe.
  static void decode(const EncodedTensor& tensor, const std::byte* codes, int64_t begin,
                     int64_t count, at::ScalarType dtype, std::byte* line);
  // All of this rank's.
  void decode_all(at::ScalarType dtype, std::byte* line) const;

  // That decode_all() reads.
  size_t bytes_to_read() const { return bytes() - block_.remainder_bytes; }
  // At rest, and without the codec.
  size_t bytes() const;
  size_t plain_bytes() const;

 private:
  void encode_all();

  const FlatPlan& plan_;
  codec::Codec codec_;
  EncodedBlock block_;
  at::Tensor codes_, remainders_;
  std::optional<PackedValues> packed_;           // lossless
  std::shared_ptr<memory::AddressRange> range_;  // the values' tensors may outlive this
  at::Tensor values_;
  bool open_ = true, written_ = true;  // first the caller fills the values
};

}  // namespace lockstep::parallel::detail
