// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/checkpoints/best_checkpoint.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/io/json.h"

namespace lockstep::train {
namespace {

constexpr const char* kKey = "best";

bool is_in(const std::string& dir, int64_t step) {
  for (const formats::Checkpoint& each : formats::list_complete(dir)) {
    if (each.step == step) return true;
  }
  return false;
}

}  // namespace

BestCheckpoint::BestCheckpoint(const config::CheckpointConfig& config, std::string measure,
                               comm::Group world)
    : enabled_(config.best),
      dir_(config.dir),
      measure_(std::move(measure)),
      world_(std::move(world)) {}

void BestCheckpoint::restore(const std::map<std::string, std::string>& state) {
  const auto found = state.find(kKey);
  if (!enabled_ || found == state.end()) return;
  comm::run_on_all_ranks("best", world_, [&]() -> std::string {
    if (world_.rank() == 0) take_over(found->second);
    return "";
  });
}

void BestCheckpoint::take_over(const std::string& text) {
  const std::string origin = "state best of the checkpoint";
  const auto json = io::parse_json(text, origin);
  const int64_t step = io::integer(io::member(json, "step", origin), origin);
  const auto& loss = io::member(json, "loss", origin);
  if (!loss.is_number()) throw CheckpointError(format("{}: loss must be a number", origin));
  const std::string measure = io::string_member(json, "measure", origin);
  const auto start_again = [&](const std::string& why) {
    log::warn(
        format("checkpoint.best: the best checkpoint so far, of step {} with validation loss "
               "{:.4f}, {}; the search starts again",
               step, loss.get<double>(), why));
  };
  if (measure != measure_) {
    start_again(format("was measured on {}, now it is {}", measure, measure_));
  } else if (!is_in(dir_, step)) {
    start_again(format("is not in {}", dir_));
  } else {
    best_ = Best{step, loss.get<double>()};
    formats::link_best(dir_, step);  // a run may have ended between the save and the link
  }
}

bool BestCheckpoint::offer(int64_t step, double loss) {
  if (!enabled_) return false;
  const auto answers = comm::run_on_all_ranks("best", world_, [&]() -> std::string {
    // Not a number is never lower.
    if (world_.rank() != 0 || !(loss < (best_ ? best_->loss : HUGE_VAL))) return "";
    before_ = std::exchange(best_, Best{step, loss});
    return "best";
  });
  return !answers[0].empty();
}

void BestCheckpoint::not_saved(int64_t step) {
  if (best_ && best_->step == step) best_ = std::exchange(before_, std::nullopt);
}

std::optional<int64_t> BestCheckpoint::step() const {
  return best_ ? std::optional(best_->step) : std::nullopt;
}

std::string BestCheckpoint::describe() const {
  if (!best_) return "";
  return format("best   step {}: validation loss {:.4f}, {}/best", best_->step, best_->loss, dir_);
}

void BestCheckpoint::add_to(std::map<std::string, std::string>& state) const {
  if (!best_) return;
  const nlohmann::ordered_json json{
      {"step", best_->step}, {"loss", best_->loss}, {"measure", measure_}};
  state[kKey] = json.dump();
}

}  // namespace lockstep::train
