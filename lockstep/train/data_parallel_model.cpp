#include "lockstep/train/data_parallel_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <variant>

#include "lockstep/nn/loss.h"
#include "lockstep/optim/clip.h"
#include "lockstep/train/eval_mode.h"
#include "lockstep/train/model_options.h"

namespace lockstep::train {

using config::TrainConfig;

DataParallelModel::DataParallelModel(const TrainConfig& config, c10::Device device,
                                     const comm::Group& group)
    : model_(nullptr),
      micro_batches_(config.accumulation(group.size())),
      exact_norm_(config.train.reproducible) {
  const parallel::MaterializeOptions values = first_values(config, device);
  const auto make = [&] {
    return model::LanguageModel(
        config.model, {.tensors = tensor_options(config, device), .recompute = config.recompute()});
  };
  if (config.parallel.shard == config::Shard::none) {
    model_ = make();
    for (const auto& item : model_->named_parameters())
      values.rule(item.value(), {.seed = values.seed, .name = item.key()});
    whole_.emplace(parallel::ddp(model_, group, {.reproducible = config.train.reproducible}));
  } else {
    // Without ever having all of it.
    auto deferred = parallel::deferred(make);
    sharded_.emplace(parallel::fully_shard(deferred, group, shard_options(config, group), values));
    model_ = deferred.model;
  }
  model_->random().seed = values.seed;
}

at::Tensor DataParallelModel::forward(const at::Tensor& tokens) {
  return whole_ ? whole_->forward(tokens) : model_->forward(tokens);
}

at::Tensor DataParallelModel::step(const StepInput& input) {
  using NoSync = std::variant<parallel::NoSync, parallel::NoSyncShards>;
  std::vector<at::Tensor> losses;
  for (int64_t i = 0; i < micro_batches_; ++i) {
    const Tensors batch = input.next();
    model_->random().position = {.step = input.step, .micro_batch = input.first_micro_batch + i};
    std::optional<NoSync> no_sync;
    if (i + 1 < micro_batches_ && whole_) no_sync.emplace(whole_->no_sync());
    if (i + 1 < micro_batches_ && sharded_) no_sync.emplace(sharded_->no_sync());
    const at::Tensor loss =
        nn::cross_entropy(forward(batch.input).flatten(0, 1), batch.target,
                          {.scale = input.loss_scale, .overwrite_logits = true});
    loss.backward();
    losses.push_back(loss.detach());
  }
  return at::stack(losses);
}

std::vector<double> DataParallelModel::evaluate(std::span<const Tensors> batches) {
  const at::NoGradGuard no_grad;
  const EvalMode eval(*model_);
  std::vector<double> losses;
  for (const Tensors& batch : batches) {
    const at::Tensor logits = model_->forward(batch.input).flatten(0, 1);
    losses.push_back(
        nn::cross_entropy(logits, batch.target, {.overwrite_logits = true}).item<double>());
  }
  return losses;
}

std::vector<optim::NamedParameter> DataParallelModel::parameters() const {
  return whole_ ? optim::named_parameters(*model_) : sharded_->named_parameters();
}

double DataParallelModel::clip_grad_norm(double max_norm) {
  const optim::NormOptions options{.exact = exact_norm_};
  if (sharded_) {
    return max_norm > 0 ? sharded_->clip_grad_norm(max_norm, options)
                        : sharded_->grad_norm(options);
  }
  const std::vector<at::Tensor> parameters = model_->parameters();
  return max_norm > 0 ? optim::clip_grad_norm(parameters, max_norm, options)
                      : optim::grad_norm(parameters, options);
}

std::vector<checkpoint::NamedSlice> DataParallelModel::slices(optim::Optimizer& optimizer) const {
  if (sharded_)
    return checkpoint::slices_of(*sharded_) + checkpoint::slices_of(*sharded_, optimizer);
  return checkpoint::slices_of(*model_) + checkpoint::slices_of(optimizer);
}

std::vector<std::string> DataParallelModel::describe() const {
  if (!sharded_) return {};
  const std::string shards = describe_shards(std::span(&*sharded_, 1));
  return shards.empty() ? std::vector<std::string>{} : std::vector<std::string>{shards};
}

}  // namespace lockstep::train
