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

void BestCheckpoint::restore(const std::map<std::string, std::string>& state,
                             std::optional<int64_t> unsaved) {
  if (!enabled_) return;
  // The text that rank 0 has counts for all: another rank may not have heard of a save that failed.
  const auto answers = comm::run_on_all_ranks("best", world_, [&]() -> std::string {
    const auto found = state.find(kKey);
    if (world_.rank() != 0 || found == state.end()) return "";
    const Verdict verdict = judge(parse(found->second), unsaved);
    return std::to_string(static_cast<int>(verdict)) + found->second;
  });
  if (answers[0].empty()) return;
  const auto verdict = static_cast<Verdict>(answers[0][0] - '0');
  if (verdict == Verdict::start_again) return;
  const Known known = parse(answers[0].substr(1));
  best_ = verdict == Verdict::best ? known.best : known.before;
  if (verdict == Verdict::best) before_ = known.before;
}

BestCheckpoint::Known BestCheckpoint::parse(const std::string& text) {
  const std::string origin = "state best of the checkpoint";
  const auto json = io::parse_json(text, origin);
  const auto best_in = [&](const auto& object) {
    const auto& loss = io::member(object, "loss", origin);
    if (!loss.is_number()) throw CheckpointError(format("{}: loss must be a number", origin));
    return Best{io::integer(io::member(object, "step", origin), origin),
                loss.template get<double>()};
  };
  Known known{best_in(json), std::nullopt, io::string_member(json, "measure", origin)};
  if (const auto before = json.find("before"); before != json.end())
    known.before = best_in(*before);
  return known;
}

// On rank 0. A run may have ended between the save and its link.
BestCheckpoint::Verdict BestCheckpoint::judge(const Known& known,
                                              std::optional<int64_t> unsaved) const {
  const auto warn = [&](const std::string& why, const std::string& then) {
    log::warn(
        format("checkpoint.best: the best checkpoint so far, of step {} with validation loss "
               "{:.4f}, {}; {}",
               known.best.step, known.best.loss, why, then));
  };
  constexpr const char* kAgain = "the search starts again";
  if (known.measure != measure_) {
    warn(format("was measured on {}, now it is {}", known.measure, measure_), kAgain);
    return Verdict::start_again;
  }
  if (is_in(dir_, known.best.step)) {
    formats::link_best(dir_, known.best.step);
    return Verdict::best;
  }
  if (known.best.step == unsaved) return Verdict::best;
  const std::string missing = format("is not in {}", dir_);
  if (!known.before || !is_in(dir_, known.before->step)) {
    warn(missing, kAgain);
    return Verdict::start_again;
  }
  warn(missing, format("that of step {} is the best again", known.before->step));
  formats::link_best(dir_, known.before->step);
  return Verdict::before;
}

bool BestCheckpoint::offer(int64_t step, double loss) {
  if (!enabled_) return false;
  const auto answers = comm::run_on_all_ranks("best", world_, [&]() -> std::string {
    // Not a number is never lower.
    return world_.rank() == 0 && loss < (best_ ? best_->loss : HUGE_VAL) ? "best" : "";
  });
  if (answers[0].empty()) return false;
  before_ = std::exchange(best_, Best{step, loss});
  return true;
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
  nlohmann::ordered_json json{{"step", best_->step}, {"loss", best_->loss}, {"measure", measure_}};
  if (before_) json["before"] = {{"step", before_->step}, {"loss", before_->loss}};
  state[kKey] = json.dump();
}

}  // namespace lockstep::train
