// SPDX-License-Identifier: Apache-2.0
// What copies in memory hold, by tensors of the whole model: whatever layout they were made in,
// ranks of another one find in them what they need. Private: not installed.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/dtype.h"
#include "lockstep/layout/box.h"

namespace lockstep::train {

struct CopiedSlice {
  std::string name = {};
  layout::Shape shape = {};  // of the whole tensor
  layout::Box box = {};      // that the slice is
  DType dtype = DType::float32;
  int rank = -1;        // whose values they are, if ranks may hold different ones
  uint64_t offset = 0;  // of its bytes in the data of a copy

  uint64_t bytes() const { return static_cast<uint64_t>(box.numel()) * size_of(dtype); }
  // What tells it from others of the model. The same on every rank that holds it.
  std::string key() const;
  bool operator==(const CopiedSlice&) const = default;
};

std::string to_text(std::span<const CopiedSlice> slices);
std::vector<CopiedSlice> slices_from(const std::string& text);

// What a rank copies, in the order in which it lies in its copy.
struct CopyShare {
  std::vector<CopiedSlice> own = {};
  // Those that no other node has, as they lie in the copy that a rank of the next node keeps.
  std::vector<CopiedSlice> sent = {};
  int to = -1;  // that rank
};
// Which rank copies which slice: on each node one of those that hold it, so that all copy about as
// much. `held` are the slices of each rank of the world, `nodes` the first rank on its node. Every
// rank computes the same from the same lists.
std::vector<CopyShare> share_copies(std::span<const std::vector<CopiedSlice>> held,
                                    std::span<const int> nodes);
// Bytes of a copy of these slices, whose offsets share_copies() has set.
uint64_t copy_bytes(std::span<const CopiedSlice> slices);

// A state of the job that was copied. States of different starts are different ones.
struct CopyId {
  int64_t generation = 0;  // starts of the job before the one that made it
  int64_t step = 0;

  auto operator<=>(const CopyId&) const = default;
};

// An area of a node's memory in which there are copies.
struct CopyPlace {
  int node = 0;    // the first rank on it
  int keeper = 0;  // the rank on it that reads the area for others
  int region = 0, area = 0;

  bool operator==(const CopyPlace&) const = default;
};
struct FoundCopies {
  CopyPlace place = {};
  std::vector<CopyId> copies = {};       // that are sound
  std::vector<CopiedSlice> slices = {};  // that each of them holds
};

// Part of a slice, and where a copy of it is.
struct CopySource {
  const FoundCopies* from = nullptr;
  const CopiedSlice* slice = nullptr;
  layout::Box part = {};
};

// Finds what a rank of a node needs in the copies that there are, which must outlive the index.
class CopyIndex {
 public:
  CopyIndex(std::span<const FoundCopies> found, int node);

  // What a slice can be filled from with the copies of one state: on this node where it can be.
  // Nothing where they do not cover it.
  std::optional<std::vector<CopySource>> sources_of(const CopiedSlice& wanted,
                                                    const CopyId& copy) const;

 private:
  struct Entry {
    const FoundCopies* from = nullptr;
    const CopiedSlice* slice = nullptr;
  };
  std::map<std::string, std::vector<Entry>> by_name_;
};

}  // namespace lockstep::train
