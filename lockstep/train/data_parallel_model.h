// The model of a training and how the data-parallel ranks share it: whole on each, or in shards.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"
#include "lockstep/model/language_model.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/shard/fully_shard.h"

namespace lockstep::train {

class DataParallelModel {
 public:
  // With its first values. Collective.
  DataParallelModel(const config::TrainConfig& config, c10::Device device,
                    const comm::Group& group);

  model::LanguageModelImpl& operator*() { return *model_; }
  model::LanguageModelImpl* operator->() { return &*model_; }
  at::Tensor forward(const at::Tensor& tokens);
  // While it is alive, backward does not communicate.
  using NoSync = std::variant<parallel::NoSync, parallel::NoSyncShards>;
  NoSync no_sync();

  // For the optimizer.
  std::vector<optim::NamedParameter> parameters() const;
  // The norm of all gradients before they are clipped; 0: they are not. Collective.
  double clip_grad_norm(double max_norm) const;
  std::vector<checkpoint::NamedSlice> slices(optim::Optimizer& optimizer) const;
  // "full: 1.2M of 4.8M parameters, in 14 units"; empty where nothing is sharded.
  std::string describe() const;

 private:
  using Wrapped = parallel::DistributedDataParallel<model::LanguageModel>;

  model::LanguageModel model_;
  bool exact_norm_;
  std::optional<Wrapped> whole_;
  std::optional<parallel::ShardedModel> sharded_;
};

}  // namespace lockstep::train
