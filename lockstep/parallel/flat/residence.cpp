// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/residence.h"

#include "lockstep/parallel/flat/gathered_residence.h"
#include "lockstep/parallel/flat/offloaded_residence.h"

namespace lockstep::parallel::detail {
namespace {

// What the model sees is the shard, which an optimizer may be updating.
class InPlaceResidence final : public Residence {
 public:
  InPlaceResidence(FlatParameter& parameter, FlatShard& shard)
      : Residence(ParameterState::gathered), shard_(shard) {
    if (!parameter.plan().is_own()) parameter.show(shard.values());
  }
  bool acquire(When when) override {
    if (when == When::now) shard_.wait_updated();
    return false;
  }
  void release() override {}
  void publish() override {}

 private:
  FlatShard& shard_;
};

}  // namespace

std::unique_ptr<Residence> make_residence(FlatParameter& parameter, FlatShard& shard,
                                          FlatEnvironment& environment) {
  const FlatPlan& plan = parameter.plan();
  if (plan.is_in_place()) return std::make_unique<InPlaceResidence>(parameter, shard);
  if (!plan.offload) return std::make_unique<GatheredResidence>(parameter, shard, environment);
  if (plan.shard.size() == 1 && plan.is_encoded())
    return std::make_unique<EncodedResidence>(parameter, shard, environment);
  if (plan.shard.size() == 1 && !plan.casts_inputs() && plan.offload->params == layout::Tier::host)
    return std::make_unique<HostResidence>(parameter, shard, environment);
  return std::make_unique<OffloadedResidence>(parameter, shard, environment);
}

}  // namespace lockstep::parallel::detail
