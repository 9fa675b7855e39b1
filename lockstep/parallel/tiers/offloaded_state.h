// SPDX-License-Identifier: Apache-2.0
// The optimizer's state of one tensor, in slices that rest on the device, on the host or on disk.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/tiers/flat_offload.h"

namespace lockstep::parallel::detail {

inline std::byte* at_element(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.data_ptr()) +
         static_cast<size_t>(index) * tensor.element_size();
}

class OffloadedState {
 public:
  // `values`: the parameter, 1-d; `params`: where it rests. Zero moments, and nothing beyond the
  // parameter. `weight`: the parameter itself, in host memory, where it is coded; there need be no
  // memory behind `values` then.
  OffloadedState(std::string name, StatePlan plan, at::Tensor values, layout::Tier params,
                 std::shared_ptr<OffloadTiers> tiers, codec::CodedArray weight = {});
  ~OffloadedState();
  OffloadedState(const OffloadedState&) = delete;
  OffloadedState& operator=(const OffloadedState&) = delete;

  struct Slice {
    StateSlice place;
    size_t bytes = 0;                             // as computed with
    std::shared_ptr<std::byte> memory = {};       // on the device or on the host; on disk: none
    std::vector<std::byte> packed = {};           // lossless, on the host
    memory::Budget::Share share = {}, room = {};  // of that
    int stores = 0;                               // since it was made
    memory::DiskStore::Block block = {};          // on disk
    size_t block_bytes = 0;
    memory::Event saved = {};  // what was sent back has arrived
  };

  const std::string& name() const { return name_; }
  const StatePlan& plan() const { return plan_; }
  const at::Tensor& values() const { return values_; }
  bool params_on_host() const { return params_ == layout::Tier::host; }
  bool is_coded() const { return weight_.codec != codec::Codec::none; }
  // From an element on, which is the first of a slice.
  codec::CodedArray weight_at(int64_t begin) const {
    return is_coded() ? weight_.from(begin) : codec::CodedArray{};
  }
  std::vector<Slice>& slices() { return slices_; }
  // The parameter in host memory, for updates on the CPU: itself, or a copy of it.
  // By the driver.
  const at::Tensor& host_values();
  // Someone else may write the parameter between these two. Where it is not its rounded master any
  // more it wins, as for other optimizers.
  void hold_values();
  void adopt_values();
  bool holds_values() const { return held_.defined(); }

  // Bytes of a slice as computed with, from wherever they rest outside the device. By the driver,
  // or while it has nothing to do.
  std::shared_ptr<std::byte> load(Slice& slice);
  void prefetch(const Slice& slice);
  // The bytes go back to where they rest; `memory` is load()'s.
  void store(Slice& slice, std::shared_ptr<std::byte> memory);

  // The slice rests farther from the device, with the same bytes: on the host if it is wanted there
  // and fits, else on the disk if there is one. False: it has found no room, and stays where it is.
  // Nothing may be in flight.
  bool move(Slice& slice, layout::Tier to);
  // Bytes that the slice is kept in outside the device.
  size_t kept_bytes(const Slice& slice) const;

  // For checkpoints: arrays as optim::UnpackedState has them. Nothing may be in flight. Null where
  // not wanted.
  void unpack(void* exp_avg, void* exp_avg_sq, void* master);
  // Null: as it is.
  void pack(const void* exp_avg, const void* exp_avg_sq, const void* master);

 private:
  static constexpr size_t kWidth = 4;  // LZ4 finds more in bytes of the same meaning

  void store_packed(Slice& slice, std::shared_ptr<std::byte> memory);
  bool take_host(Slice& slice, size_t bytes);
  template <class Visit>
  void for_each_on_host(const Visit& visit);

  std::string name_;
  StatePlan plan_;
  at::Tensor values_;
  codec::CodedArray weight_;
  layout::Tier params_;
  std::shared_ptr<OffloadTiers> tiers_;
  std::vector<Slice> slices_;
  at::Tensor mirror_;
  at::Tensor held_;  // the master
};

}  // namespace lockstep::parallel::detail
