// SPDX-License-Identifier: Apache-2.0
// For torch::data: which samples of a dataset this rank takes, and when.
//
//   data::DistributedSampler sampler(size, group, {.seed = 7});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, /*batch_size=*/32);
//   for (int epoch = 0; epoch < 10; ++epoch)
//     for (auto& batch : *loader) ...
//
// Every epoch has an order of its own, which is a function of the seed and the epoch. The ranks'
// k-th batches, one after the other, are the k-th batch of a single rank with a batch size n times
// as large: with batches of 32, rank 1 has its rows 32 to 63. All ranks must ask for batches of the
// same size.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::data {

struct DistributedSamplerOptions {
  uint64_t seed = 0;
  bool shuffle = true;  // off: every epoch has the dataset's order
  // Every rank takes as many samples. Where their number is no multiple of the ranks, the last ones
  // of an epoch's order are left out of it, or with `repeat` its first ones are taken again.
  bool repeat = false;
};

// Where a run is: the epoch, and the samples of it that all ranks together have taken.
struct SamplerPosition {
  int64_t epoch = 0, taken = 0;
  bool operator==(const SamplerPosition&) const = default;
};

// A value: copies share the position, so that a program can ask for the position of the sampler
// that a data loader has, and set it. Not collective: ranks agree because their arguments do.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // `size`: of the dataset. ConfigError where a rank would have no sample.
  DistributedSampler(int64_t size, const comm::Group& group,
                     DistributedSamplerOptions options = {});
  ~DistributedSampler() override;
  DistributedSampler(const DistributedSampler&);
  DistributedSampler& operator=(const DistributedSampler&);

  // Of this rank in an epoch; the same on every rank.
  int64_t samples_per_rank() const;

  // What next() continues from. A loader's workers may be ahead of the program: to save a position,
  // count the batches that were trained, and save {epoch, batches x batch size x ranks}.
  SamplerPosition position() const;
  // The next pass of the loader continues there, on any number of ranks that divides `taken`.
  // ConfigError for a position that the dataset does not have.
  void set_position(SamplerPosition position);
  // The same for the beginning of an epoch. Without it every pass takes the next epoch.
  void set_epoch(int64_t epoch) { set_position({.epoch = epoch}); }

  // For the loader: begins a pass. `new_size` replaces the dataset's size.
  void reset(torch::optional<size_t> new_size = torch::nullopt) override;
  // This rank's next samples, at most `batch_size`; none where the epoch is over.
  torch::optional<std::vector<size_t>> next(size_t batch_size) override;
  // The position.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::data
