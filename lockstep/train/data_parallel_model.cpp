#include "lockstep/train/data_parallel_model.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/core/format.h"
#include "lockstep/model/hugging_face.h"
#include "lockstep/optim/clip.h"
#include "lockstep/train/progress.h"

namespace lockstep::train {
namespace {

using config::Shard;
using config::TrainConfig;
using parallel::ShardingStrategy;

ShardingStrategy strategy_of(Shard shard) {
  switch (shard) {
    case Shard::none:
      return ShardingStrategy::no_shard;
    case Shard::full:
      return ShardingStrategy::full_shard;
    case Shard::grad_op:
      return ShardingStrategy::shard_grad_op;
    case Shard::optimizer:
      return ShardingStrategy::optimizer;
    case Shard::hybrid:
      return ShardingStrategy::hybrid_shard;
  }
  return ShardingStrategy::no_shard;
}

// Blocks, and what comes before and after them.
bool is_unit(const std::string& path, torch::nn::Module&) {
  const std::string blocks = "blocks.";
  if (path.starts_with(blocks)) return path.find('.', blocks.size()) == std::string::npos;
  return path == "embed" || path == "positions" || path == "head";
}

parallel::FullyShardOptions shard_options(const TrainConfig& config, const comm::Group& group) {
  parallel::FullyShardOptions options{.strategy = strategy_of(config.parallel.shard),
                                      .units = parallel::ByPredicate(is_unit),
                                      .use_orig_params = true,
                                      .reproducible = config.train.reproducible};
  if (options.strategy == ShardingStrategy::hybrid_shard) {
    options.hybrid_group_size =
        config.parallel.shard_size > 0 ? config.parallel.shard_size : group.local_size();
  }
  return options;
}

}  // namespace

DataParallelModel::DataParallelModel(const TrainConfig& config, c10::Device device,
                                     const comm::Group& group)
    : model_(nullptr), exact_norm_(config.train.reproducible) {
  const bool half = config.train.dtype == config::Precision::bfloat16;
  const auto tensors = at::TensorOptions().device(device).dtype(half ? at::kBFloat16 : at::kFloat);
  const auto seed = static_cast<uint64_t>(config.train.seed);
  const nn::InitializeRule first_values =
      config.model_path.empty() ? model::initial_values(config.model)
                                : model::hugging_face_values(config.model, config.model_path);
  const auto make = [&] {
    return model::LanguageModel(config.model,
                                {.tensors = tensors, .recompute = config.recompute()});
  };
  if (config.parallel.shard == Shard::none) {
    model_ = make();
    for (const auto& item : model_->named_parameters())
      first_values(item.value(), {.seed = seed, .name = item.key()});
    whole_.emplace(parallel::ddp(model_, group, {.reproducible = config.train.reproducible}));
  } else {
    // Without ever having all of it.
    auto deferred = parallel::deferred(make);
    sharded_.emplace(parallel::fully_shard(deferred, group, shard_options(config, group),
                                           {.seed = seed, .device = device, .rule = first_values}));
    model_ = deferred.model;
  }
  model_->random().seed = seed;
}

at::Tensor DataParallelModel::forward(const at::Tensor& tokens) {
  return whole_ ? whole_->forward(tokens) : model_->forward(tokens);
}

DataParallelModel::NoSync DataParallelModel::no_sync() {
  if (whole_) return whole_->no_sync();
  return sharded_->no_sync();
}

std::vector<optim::NamedParameter> DataParallelModel::parameters() const {
  return whole_ ? optim::named_parameters(*model_) : sharded_->named_parameters();
}

double DataParallelModel::clip_grad_norm(double max_norm) const {
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

std::string DataParallelModel::describe() const {
  if (!sharded_ || sharded_->units().empty()) return "";
  const parallel::ShardStats stats = sharded_->stats();
  const auto all = static_cast<double>(stats.num_parameters);
  return format("{}: {} of {} parameters on this rank, in {} units",
                parallel::name_of(sharded_->options().strategy),
                short_number(stats.local_ratio * all), short_number(all), sharded_->units().size());
}

}  // namespace lockstep::train
