// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/offload/offloaded_rule.h"

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/optim/adamw_factors.h"
#include "lockstep/optim/sgd_factors.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel {
namespace {

template <class Step>
Step step_of(const auto& now) {
  return {.step = now.step, .lr = now.lr, .weight_decay = now.weight_decay};
}

}  // namespace

const std::shared_ptr<detail::OffloadTiers>& OffloadedOptimizer::Rule::tiers_of(
    const ShardedModel& model) const {
  const auto& engine = model.shared()->engine;
  if (!engine || !engine->tiers())
    throw ConfigError(format("[{}] the model is not offloaded: give fully_shard an offload", name));
  const layout::UpdateRule planned = engine->tiers()->options.advanced.update_rule;
  if (planned != kind) {
    throw ConfigError(
        format("[{}] this is {}, but fully_shard has planned for the state of {}: give it "
               "offload.advanced.update_rule {}",
               name, layout::name_of(kind), layout::name_of(planned), layout::name_of(kind)));
  }
  return engine->tiers();
}

OffloadedAdamW::OffloadedAdamW(std::vector<ShardedModel> models,
                               std::vector<optim::ParameterGroup> groups,
                               optim::AdamWOptions options)
    : OffloadedOptimizer(std::move(models), std::move(groups),
                         {.name = "OffloadedAdamW",
                          .kind = layout::UpdateRule::adamw,
                          .moments = {"exp_avg", "exp_avg_sq"},
                          .lr = options.lr,
                          .weight_decay = options.weight_decay,
                          .factors = [options](const Rule::Step& now) -> optim::PackedFactors {
                            return optim::adamw_factors(options, step_of<optim::AdamWStep>(now));
                          }}) {
  optim::validate(options);
  if (options.moments == optim::MomentType::bfloat16) {
    throw ConfigError(
        "[OffloadedAdamW] moments is bfloat16, must be float32: offloaded moments are encoded by "
        "the codec of fully_shard's offload, which may be bf16");
  }
}

OffloadedAdamW::OffloadedAdamW(const ShardedModel& model, optim::AdamWOptions options)
    : OffloadedAdamW({model}, {{.parameters = model.named_parameters()}}, options) {}

OffloadedSGD::OffloadedSGD(std::vector<ShardedModel> models,
                           std::vector<optim::ParameterGroup> groups, optim::SGDOptions options)
    : OffloadedOptimizer(
          std::move(models), std::move(groups),
          {.name = "OffloadedSGD",
           .kind =
               options.momentum == 0 ? layout::UpdateRule::sgd : layout::UpdateRule::sgd_momentum,
           .moments = options.momentum == 0 ? std::vector<std::string>{}
                                            : std::vector<std::string>{"momentum_buffer"},
           .lr = options.lr,
           .weight_decay = options.weight_decay,
           .factors = [options](const Rule::Step& now) -> optim::PackedFactors {
             return optim::SgdUpdate{
                 .kind = optim::sgd_kind(options),
                 .factors = optim::sgd_factors(options, step_of<optim::SgdStep>(now))};
           }}) {
  optim::validate(options);
}

OffloadedSGD::OffloadedSGD(const ShardedModel& model, optim::SGDOptions options)
    : OffloadedSGD({model}, {{.parameters = model.named_parameters()}}, options) {}

}  // namespace lockstep::parallel
