// SPDX-License-Identifier: Apache-2.0
// One step: forward and backward of its micro-batches, the update, and what all ranks learn of it.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/train/batches.h"
#include "lockstep/train/step_sums.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {

// The gradients of a step, averaged over ranks.
Trainer::State::Gradients Trainer::State::compute(const std::vector<data::Batch>& batches) {
  const double fault = faults.begin_step(done + 1, model.pipeline());
  auto batch = batches.begin();
  // Gradients are averaged over ranks, so each scales by their number to get the batch's mean.
  const at::Tensor losses = model.step(
      {.next = [&] { return to_tensors(*batch++, config.train.seq_len, device, model.context()); },
       .step = done,
       .first_micro_batch = model.replica() * accumulation,
       .loss_scale = fault * dp.size() / static_cast<double>(batches[0].step_targets),
       .is_recorded = !data.train.has_examples() && !faults.has_hooks()});
  if (looks_at(done + 1)) health->before_update(model.pipeline());
  const double norm = model.grad_norm();
  // Now, while a device has nothing queued: behind the optimizer's work it would be waited for.
  return {.losses = losses.to(at::kCPU, at::kDouble), .norm = norm};
}

// What made the gradients NaN may be over, or be repaired: the same batches, with the weights as
// they were.
Trainer::State::Gradients Trainer::State::compute_again(const std::vector<data::Batch>& batches,
                                                        const std::string& cause) {
  progress->pause();
  if (world.rank() == 0) {
    log::warn(format("step {}: the gradients are not finite, because of {}; it is computed again",
                     done + 1, cause));
  }
  verified_at = -1;
  verify();
  progress->resume();
  optimizer->zero_grad();
  return compute(batches);
}

StepMetrics Trainer::State::step() {
  const trace::Span span("train", "step");
  StepClock clock(world);
  std::vector<data::Batch> batches;
  for (int64_t i = 0; i < accumulation; ++i) batches.push_back(reader->next());
  clock.lap(&StepSplit::data_ms);
  const int64_t step_tokens = batches[0].step_inputs;
  optimizer->set_lr(schedule.lr(done));  // before backward, in which parameters may be updated
  Gradients found = compute(batches);
  clock.lap(&StepSplit::compute_ms, model.pipeline().stats().waited);
  clock.find_update(queued_update.restart());
  if (copies) copies->wait();  // before the update, and before ranks learn that this one is here
  StepMetrics result{.step = done + 1, .lr = schedule.lr(done)};
  result.peak_bytes = peak_bytes(device);
  const auto exchange = [&] {
    return combine(
        found.losses,
        {.stop = stop.asked(), .busy_ms = clock.split().busy_ms(), .peak_bytes = result.peak_bytes},
        mesh);
  };
  std::optional<StepSums> sums;
  bool spike = false;
  // Whether no rank may update.
  const auto rejected = [&] {
    // The loss must be known before the update only where it decides about it.
    if (config.train.on_spike == config::OnSpike::skip) sums = exchange();
    spike = sums && std::isfinite(found.norm) && bad_steps.is_spike(sums->loss);
    return !guard.step(*optimizer, spike ? std::numeric_limits<double>::infinity() : found.norm,
                       optimizer->updates_in_backward() ? 0 : config.optim.clip);
  };
  result.skipped = rejected();
  if (result.skipped && !spike && !optimizer->updates_in_backward()) {
    found = compute_again(batches, model.nonfinite_cause(found.losses, world));
    result.skipped = rejected();
  }
  queued_update.end();
  result.grad_norm = found.norm;
  last_step = {.step = done + 1, .nonfinite = result.skipped && !spike};
  if (last_step.nonfinite) last_step.cause = model.nonfinite_cause(found.losses, world);
  if (last_step.nonfinite && optimizer->updates_in_backward()) {
    if (config.train.on_nonfinite != config::OnNonfinite::rollback) {
      throw Error(
          format("the gradients of step {} are not finite, and offload.clip_mode none has "
                 "updated with them, because of {}; resume from a checkpoint with a lower optim.lr",
                 done + 1, last_step.cause));
    }
    optimizer->step();  // ends what backward has updated; a checkpoint replaces it
  }
  if (looks_at(done + 1))
    observer->event("health", done + 1, health->after_update(model.pipeline()));
  if (done + 1 == measures_at && !config.run.dir.empty())
    measured = measure(device, model, *optimizer, /*has_stepped=*/true);
  optimizer->zero_grad();
  clock.lap(&StepSplit::optimizer_ms);
  if (!sums) sums = exchange();
  clock.lap(&StepSplit::communication_ms);
  ++done;
  faults.end_step(done, [&] { return model.slices(*optimizer); });
  samples += global_batch;
  tokens += step_tokens;
  stopping = possible(sums->stop);
  result.loss = last_step.loss = sums->loss;
  result.busy_ms = std::move(sums->busy_ms);
  result.rank_peak_bytes = std::move(sums->peak_bytes);
  clock.find_stall(*std::ranges::max_element(result.busy_ms));
  result.split = clock.split();
  result.split.checkpoint_ms = std::exchange(saving_ms, 0);
  result.time = seconds_since_1970();
  result.tokens = tokens;
  result.step_ms = clock.step_ms();
  result.tokens_per_s = 1e3 * static_cast<double>(step_tokens) / result.step_ms;
  result.comm_ms = clock.blocked_ms();
  flight::set_step(done, static_cast<int64_t>(1e6 * result.step_ms),
                   static_cast<int64_t>(1e6 * result.comm_ms));
  return result;
}

}  // namespace lockstep::train
