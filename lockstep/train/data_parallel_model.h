// A model that each data-parallel rank runs by itself: whole, or in shards. Private: not installed.
#pragma once

#include <optional>

#include "lockstep/comm/group.h"
#include "lockstep/model/language_model.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

class DataParallelModel final : public TrainedModel {
 public:
  DataParallelModel(const config::TrainConfig& config, c10::Device device,
                    const comm::Group& group);

  at::Tensor step(const StepInput& input) override;
  std::vector<double> evaluate(std::span<const Tensors> batches) override;
  std::vector<optim::NamedParameter> parameters() const override;
  double clip_grad_norm(double max_norm) override;
  std::vector<checkpoint::NamedSlice> slices(optim::Optimizer& optimizer) const override;
  std::vector<std::string> describe() const override;

 private:
  using Wrapped = parallel::DistributedDataParallel<model::LanguageModel>;

  at::Tensor forward(const at::Tensor& tokens);

  model::LanguageModel model_;
  int64_t micro_batches_;  // of a step
  bool exact_norm_;
  std::optional<Wrapped> whole_;
  std::optional<parallel::ShardedModel> sharded_;
};

}  // namespace lockstep::train
