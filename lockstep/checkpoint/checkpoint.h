// SPDX-License-Identifier: Apache-2.0
// Saving and loading what the ranks of a job hold, by global name and slice: docs/checkpoints.md.
//
//   const auto state = checkpoint::state(*model, optimizer);
//   if (const auto loaded = checkpoint::load_newest("checkpoints", state, group))
//     step = loaded->step;
//   checkpoint::save("checkpoints", {.step = step, .slices = state}, group);
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

struct SaveRequest {
  int64_t step = 0;
  std::vector<NamedSlice> slices = {};            // what this rank holds
  std::map<std::string, std::string> state = {};  // JSON texts, the same on all ranks
  std::string config = "{}";                      // likewise
  // How many of the newest complete ones stay when this one is complete; 0: all.
  int keep = 0;
  // Step of the checkpoint that DIR/best links to when this one is complete. It stays in addition
  // to the newest ones.
  std::optional<int64_t> best = std::nullopt;
};

// Collective. Writes DIR/step-N and returns its path, once it is complete and on disk. Of a slice
// that several ranks hold, one writes it; the work is spread evenly. Where a rank fails all throw,
// and what was there before is untouched. ConfigError where another process saves in DIR. saver.h
// does the same concurrently with training.
std::string save(const std::string& dir, const SaveRequest& request, const comm::Group& group = {});

// Collective: the path of the newest checkpoint in DIR whose manifest is sound and whose files have
// the right sizes; none where there is none. Pass it to load().
std::optional<std::string> newest(const std::string& dir, const comm::Group& group = {});

struct LoadOptions {
  bool verify = true;  // compare the checksums of what is read
  // Tensors of the checkpoint whose names begin with one of these need not be asked for: {"optim."}
  // for the model alone.
  std::vector<std::string> may_ignore = {};
  // What is missing, too many or of another shape is a warning; such slices stay as they are.
  bool partial = false;
};

// What a checkpoint says besides its tensors.
struct Loaded {
  std::string path = {};
  int64_t step = 0;
  std::map<std::string, std::string> state = {};  // as Contents has them
  std::string config = {};
};

// Collective. Fills the slices from a checkpoint of any layout, converting where the dtype differs.
// CheckpointError lists the tensors that are missing, too many or of
// another shape; then nothing has been written. Each rank reads what it needs, through a buffer of
// a few MiB; all throw where one fails.
Loaded load(const std::string& path, const std::vector<NamedSlice>& slices,
            const comm::Group& group = {}, const LoadOptions& options = {});

// Collective: load() of the newest checkpoint in DIR that is sound. Of each that is damaged there
// is a warning that names the damage. None where DIR has no checkpoint; ConfigError where it has,
// but none is sound.
std::optional<Loaded> load_newest(const std::string& dir, const std::vector<NamedSlice>& slices,
                                  const comm::Group& group = {}, const LoadOptions& options = {});

// Collective: what is damaged in a checkpoint, empty where nothing is. Each rank reads some of its
// files, every byte of them.
std::string damage_in(const std::string& path, const comm::Group& group = {});

}  // namespace lockstep::checkpoint
