// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/distributed_sampler.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct DistributedSampler::State {
  const int64_t rank, ranks;
  const DistributedSamplerOptions options;
  mutable std::mutex mutex = {};  // a loader may ask in another thread than the program
  std::optional<data::Sampler> order = std::nullopt;
  SamplerPosition at = {};
  bool begun = false;  // the pass has taken samples, so that the next one is of the next epoch

  void set_size(int64_t size) {
    if (size < (options.repeat ? 1 : ranks)) {
      throw ConfigError(format(
          "[DistributedSampler] {} samples over {} ranks: every rank must have at least one; "
          "use fewer ranks, or set repeat",
          size, ranks));
    }
    order.emplace(size, options.seed);
  }
  int64_t per_rank() const { return (order->samples() + (options.repeat ? ranks - 1 : 0)) / ranks; }
  size_t sample(int64_t place) const {
    const int64_t samples = order->samples();
    if (!options.shuffle) return static_cast<size_t>(place % samples);
    return static_cast<size_t>((*order)(at.epoch * samples + place % samples));
  }
  void move_to(SamplerPosition position) {
    if (position.epoch < 0 || position.taken < 0 || position.taken > per_rank() * ranks ||
        position.taken % ranks != 0) {
      throw ConfigError(format(
          "[DistributedSampler] position: epoch {}, {} samples taken; epochs are counted from "
          "0, and the samples must be a multiple of the {} ranks and at most {}",
          position.epoch, position.taken, ranks, per_rank() * ranks));
    }
    at = position;
    begun = false;
  }
};

DistributedSampler::DistributedSampler(int64_t size, const comm::Group& group,
                                       DistributedSamplerOptions options)
    : state_(new State{.rank = group.rank(), .ranks = group.size(), .options = options}) {
  state_->set_size(size);
}
DistributedSampler::~DistributedSampler() = default;
DistributedSampler::DistributedSampler(const DistributedSampler&) = default;
DistributedSampler& DistributedSampler::operator=(const DistributedSampler&) = default;

int64_t DistributedSampler::samples_per_rank() const {
  const std::lock_guard lock(state_->mutex);
  return state_->per_rank();
}

SamplerPosition DistributedSampler::position() const {
  const std::lock_guard lock(state_->mutex);
  return state_->at;
}

void DistributedSampler::set_position(SamplerPosition position) {
  const std::lock_guard lock(state_->mutex);
  state_->move_to(position);
}

void DistributedSampler::reset(torch::optional<size_t> new_size) {
  const std::lock_guard lock(state_->mutex);
  if (new_size) state_->set_size(static_cast<int64_t>(*new_size));
  // A position that was set, and the first one, are where a pass begins.
  if (state_->begun) state_->move_to({.epoch = state_->at.epoch + 1});
}

torch::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  const std::lock_guard lock(state_->mutex);
  State& state = *state_;
  state.begun = true;
  const int64_t left = state.per_rank() - state.at.taken / state.ranks;
  const int64_t count = std::min(left, static_cast<int64_t>(batch_size));
  if (count <= 0) return torch::nullopt;
  std::vector<size_t> batch;
  const int64_t first = state.at.taken + state.rank * count;
  for (int64_t i = 0; i < count; ++i) batch.push_back(state.sample(first + i));
  state.at.taken += state.ranks * count;
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const SamplerPosition at = position();
  archive.write("position", at::tensor(std::vector<int64_t>{at.epoch, at.taken}, at::kLong),
                /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor position = at::empty({2}, at::kLong);
  archive.read("position", position, /*is_buffer=*/true);
  const int64_t* const value = position.data_ptr<int64_t>();
  set_position({.epoch = value[0], .taken = value[1]});
}

}  // namespace lockstep::data
