// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/trained_model.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/config/pipeline_choice.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/loss.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/schedule/simulate.h"
#include "lockstep/train/eval_mode.h"
#include "lockstep/train/model_options.h"

namespace lockstep::train {
namespace {

using Graphs = parallel::PipelineGraphs;

Graphs graphs_of(const config::TrainConfig& config, c10::Device device) {
  if (!device.is_cuda() || config.train.graphs == config::Graphs::off ||
      !config.graphs_obstacle().empty())
    return Graphs::none;
  return config.train.graphs ? Graphs::always : Graphs::if_possible;
}

// What a parallel configuration does not speak of.
parallel::PipelineOptions other_options(const config::TrainConfig& config, c10::Device device,
                                        const comm::Group& world,
                                        const std::shared_ptr<nn::RandomContext>& random,
                                        const GradientWatch& watch) {
  parallel::PipelineOptions options{.device = device,
                                    .advanced = {.initializer = initializer(config, device),
                                                 .random = random,
                                                 .store = activation_store(config, world.rank()),
                                                 .group = config.parallel.group,
                                                 .schedule_file = config.parallel.schedule_file,
                                                 .graphs = graphs_of(config, device)}};
  if (config.parallel.shard == layout::ShardingStrategy::no_shard && !config.offload.any()) {
    options.data = parallel::DdpOptions{.reproducible = config.train.reproducible,
                                        .hook = parallel::hooks::by_name(config.comm.compression),
                                        .advanced = {.observe = watch.observer()}};
  } else {
    auto shard = shard_options(config);
    shard.advanced.observe = watch.observer();
    options.data = std::move(shard);
  }
  return options;
}

layout::Coordinate coordinate_of(const config::TrainConfig& config, const comm::Group& world) {
  return layout::RankMap(config.dims(world.size()), config.parallel.order)
      .coordinate_of(world.rank());
}

// Those with the same rows, and other coordinates that are the same. Collective.
comm::Group context_group(const config::TrainConfig& config, const comm::Group& world) {
  if (config.parallel.cp == 1) return {};
  const layout::ParallelDims dims = config.dims(world.size());
  const layout::Coordinate at = coordinate_of(config, world);
  const auto [replica, rank] = config.context_place(at.dp, world.size());
  return world.split((replica * dims.tp + at.tp) * dims.pp + at.pp, rank);
}

std::shared_ptr<model::Tiling> tiling_of(const config::TrainConfig& config, bool for_text) {
  const int64_t size = for_text ? 0 : config.tile();
  return size == 0 ? nullptr : std::make_shared<model::Tiling>(model::Tiling{.size = size});
}

std::shared_ptr<nn::RandomContext> random_context(const config::TrainConfig& config,
                                                  const comm::Group& context) {
  auto random = std::make_shared<nn::RandomContext>();
  random->seed = static_cast<uint64_t>(config.train.seed);
  random->token_ranks = context.size();
  random->token_rank = context.rank();
  return random;
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const config::TrainConfig& config,
                                                 const TrainedModel& model) {
  const config::OptimConfig& options = config.optim;
  auto groups = optim::decay_groups(model.parameters(), options.weight_decay);
  const bool offloaded = config.offload.any();
  if (options.name == config::OptimizerKind::sgd) {
    const optim::SGDOptions sgd{.lr = options.lr, .momentum = options.momentum};
    if (offloaded)
      return std::make_unique<parallel::OffloadedSGD>(model.sharded(), std::move(groups), sgd);
    return std::make_unique<optim::SGD>(std::move(groups), sgd);
  }
  const optim::AdamWOptions adamw{.lr = options.lr,
                                  .beta1 = options.betas[0],
                                  .beta2 = options.betas[1],
                                  .eps = options.eps,
                                  .moments = options.moments == config::Precision::bfloat16
                                                 ? optim::MomentType::bfloat16
                                                 : optim::MomentType::float32,
                                  .seed = static_cast<uint64_t>(config.train.seed)};
  if (offloaded)
    return std::make_unique<parallel::OffloadedAdamW>(model.sharded(), std::move(groups), adamw);
  return std::make_unique<optim::AdamW>(std::move(groups), adamw);
}

TrainedModel::TrainedModel(const config::TrainConfig& config, c10::Device device,
                           const comm::Group& world,
                           const std::shared_ptr<model::Decoding>& decoding)
    : context_(context_group(config, world)),
      replica_(config.context_place(coordinate_of(config, world).dp, world.size()).replica),
      random_(random_context(config, context_)),
      tiling_(tiling_of(config, decoding != nullptr)),
      exact_norm_(config.train.reproducible),
      updates_in_backward_(config.offload.any() &&
                           config.offload.advanced.clip_mode == layout::ClipMode::none),
      vocab_(config.model.vocab),
      frozen_(describe_frozen(config)),
      pipeline_(
          parallel::parallelize(model_layers(config, device, random_, decoding, context_, tiling_),
                                config::parallel_config(config, world.size()), world,
                                other_options(config, device, world, random_, watch_))) {}

at::Tensor TrainedModel::loss(const at::Tensor& logits, const at::Tensor& target,
                              double scale) const {
  return nn::cross_entropy(logits.flatten(0, 1), target,
                           {.scale = scale,
                            .overwrite_logits = true,
                            .group = pipeline_.tensor().group(),
                            .vocab = vocab_});
}

at::Tensor TrainedModel::loss_of(const parallel::Tensors& outputs, const Tensors& batch,
                                 double scale) const {
  return outputs[0].dim() == 0 ? outputs[0] : loss(outputs[0], batch.target, scale);
}

// A tile of ranks that share the sequence is of the tokens of all of them.
void TrainedModel::prepare_tiles(const Tensors& batch, double scale) {
  if (!tiling_) return;
  const auto& tensor = pipeline_.tensor();
  const int64_t ranks = tensor.options().sequence_parallel ? tensor.group().size() : 1;
  const at::Tensor targets = batch.target.view({batch.input.size(0), ranks, -1});
  if (targets.size(2) <= tiling_->size) return;
  tiling_->loss = [this, targets, ranks, scale](const at::Tensor& logits, int64_t begin) {
    const at::Tensor part = targets.narrow(2, begin, logits.size(1) / ranks);
    return loss(logits, part.reshape({-1}), scale);
  };
}

const Tensors& TrainedModel::in_place(const Tensors& batch) {
  Tensors& place = places_[batch.input.sizes().vec()];
  if (!place.input.defined())
    place = {.input = at::empty_like(batch.input), .target = at::empty_like(batch.target)};
  place.input.copy_(batch.input);
  place.target.copy_(batch.target);
  return place;
}

at::Tensor TrainedModel::step(const StepInput& input) {
  watch_.clear();
  const bool is_recorded = input.is_recorded && pipeline_.options().advanced.graphs != Graphs::none;
  std::vector<Tensors> batches;
  for (int i = 0; i < pipeline_.options().microbatches; ++i) batches.push_back(input.next());
  const auto batch = [&](int i) -> const Tensors& { return batches[static_cast<size_t>(i)]; };
  parallel::PipelineBatch steps{
      .inputs =
          [&](int i) {
            if (is_recorded) batches[static_cast<size_t>(i)] = in_place(batch(i));
            return batch(i).inputs();
          },
      .loss =
          [&](int i, const parallel::Tensors& outputs) {
            return loss_of(outputs, batch(i), input.loss_scale);
          },
      .begin =
          [&](int i) {
            random_->position = {.step = input.step, .micro_batch = input.first_micro_batch + i};
            prepare_tiles(batch(i), input.loss_scale);
          }};
  if (is_recorded) {
    steps.recorded_as = [&](int i) {
      return format("({}), scale {}", join(batch(i).input.sizes()), input.loss_scale);
    };
  }
  return pipeline_.step(steps, {.leave_losses = true});
}

std::vector<double> TrainedModel::evaluate(std::span<const Tensors> batches) {
  const EvalMode eval(pipeline_);
  const auto batch = [&](int i) -> const Tensors& { return batches[static_cast<size_t>(i)]; };
  const at::Tensor losses = pipeline_.evaluate(
      {.inputs = [&](int i) { return batch(i).inputs(); },
       .loss = [&](int i,
                   const parallel::Tensors& outputs) { return loss_of(outputs, batch(i), 1); },
       .begin = [&](int i) { prepare_tiles(batch(i), 1); }},
      static_cast<int>(batches.size()));
  return {losses.data_ptr<double>(), losses.data_ptr<double>() + losses.numel()};
}

at::Tensor TrainedModel::logits(const at::Tensor& sequence, int64_t position) {
  const EvalMode eval(pipeline_);
  if (tiling_) tiling_->loss = {};
  const auto outputs = pipeline_.forward([&](int) { return parallel::Tensors{sequence}; });
  if (outputs.empty()) return at::empty({0}, at::kFloat);
  return outputs[0][0].flatten(0, 1)[position].to(at::kCPU, at::kFloat).contiguous();
}

// A pipeline is filled twice over.
int64_t TrainedModel::batches_at_once() const {
  const schedule::Schedule& schedule = pipeline_.schedule();
  return schedule.ranks == 1 ? 1 : 2 * schedule.stages();
}

double TrainedModel::grad_norm() const {
  return updates_in_backward_ ? pipeline_.sharded()[0].grad_norm()
                              : pipeline_.grad_norm({.exact = exact_norm_});
}

std::string TrainedModel::nonfinite_cause(const at::Tensor& losses,
                                          const comm::Group& world) const {
  return watch_.explain(losses, parameters(), world);
}

std::vector<checkpoint::NamedSlice> TrainedModel::slices() const {
  return checkpoint::slices_of(pipeline_);
}

std::vector<checkpoint::NamedSlice> TrainedModel::slices(optim::Optimizer& optimizer) const {
  return checkpoint::state(pipeline_, optimizer);
}

int64_t TrainedModel::arena_bytes() const { return arenas_of(pipeline_.sharded()); }

std::vector<std::string> TrainedModel::describe() const {
  const schedule::Schedule& schedule = pipeline_.schedule();
  std::vector<std::string> lines;
  if (const auto& tensor = pipeline_.tensor(); tensor.group().size() > 1) {
    lines.push_back(format("tensor {} ranks share each matrix{}", tensor.group().size(),
                           tensor.options().sequence_parallel ? ", and the sequence" : ""));
  }
  if (schedule.ranks > 1) {
    const auto simulation = schedule::simulate(schedule, schedule::uniform({}));
    const int held = *std::max_element(simulation.peak_live.begin(), simulation.peak_live.end());
    lines.push_back(
        format("pipe   {}: {} stages on {} ranks, {} micro-batches, {} held at most; idle {:.0f} % "
               "if stages are alike",
               layout::name_of(schedule.kind), schedule.stages(), schedule.ranks,
               schedule.microbatches, held, 100 * simulation.bubble_makespan));
  }
  if (!frozen_.empty()) lines.push_back(frozen_);
  const std::string shards = describe_shards(pipeline_.sharded());
  if (!shards.empty()) lines.push_back(shards);
  const std::string offload = describe_offload(pipeline_.sharded());
  if (!offload.empty()) lines.push_back(offload);
  return lines;
}

}  // namespace lockstep::train
