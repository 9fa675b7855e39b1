// SPDX-License-Identifier: Apache-2.0
// Copies that a rank of another node keeps. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/recovery/copied_slices.h"
#include "lockstep/train/recovery/copy_region.h"

namespace lockstep::train {

// Sends what a rank has copied to the next node, and takes what another one sends, in messages of
// limited size.
class CopyExchange {
 public:
  // `group` has the ranks of the world, and no other thread uses it.
  CopyExchange(comm::Group group, const CopyShare& share);

  // What comes from a rank: so many bytes, between begin() and commit() of a copy.
  struct Incoming {
    int from = 0;
    uint64_t bytes = 0;
    CopyRegion* region = nullptr;
  };
  // `data`: this rank's copy. Collective.
  void run(std::span<const std::byte> data, std::span<const Incoming> incoming);

 private:
  // Bytes of the copy, and where they lie in what is sent.
  struct Run {
    uint64_t from = 0, to = 0, bytes = 0;
  };
  void pack(std::span<const std::byte> data, uint64_t begin, std::span<std::byte> message) const;

  comm::Group group_;
  int to_;
  uint64_t bytes_;
  std::vector<Run> runs_;
  at::Tensor out_;
  std::vector<at::Tensor> in_;
};

}  // namespace lockstep::train
