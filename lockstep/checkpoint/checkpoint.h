// Saving and loading what the ranks of a job hold, by global name and slice: docs/checkpoints.md.
//
//   checkpoint::save("checkpoints", {.step = step, .slices = slices_of(*model)}, group);
//   checkpoint::load(path, slices_of(*model), group);
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::checkpoint {

struct Contents {
  int64_t step = 0;
  std::vector<NamedSlice> slices = {};            // what this rank holds
  std::map<std::string, std::string> state = {};  // JSON texts, the same on all ranks
  std::string config = "{}";                      // likewise
};

// Collective. Writes DIR/step-N and returns its path, once it is complete and on disk. Of a slice
// that several ranks hold, one writes it; the work is spread evenly. Where a rank fails all throw,
// and what was there before is untouched.
std::string save(const std::string& dir, const Contents& contents, const comm::Group& group = {});

struct LoadOptions {
  bool verify = true;  // compare the checksums of all files that are read
  // Tensors of the checkpoint whose names begin with one of these need not be asked for.
  std::vector<std::string> may_ignore = {};
};

// Fills the slices from a checkpoint of any layout, converting where the dtype differs, and returns
// its manifest. CheckpointError lists the tensors that are missing, too many or of another shape;
// then nothing has been written. Ranks read what they need, each for itself; all throw where one
// fails. Collective.
formats::Manifest load(const std::string& path, const std::vector<NamedSlice>& slices,
                       const comm::Group& group = {}, const LoadOptions& options = {});

}  // namespace lockstep::checkpoint
