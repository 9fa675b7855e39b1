// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/restart_policy.h"

#include <algorithm>
#include <cstdio>

#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kHour{3'600'000};
constexpr int kHopeless = 3;  // restarts without progress
constexpr milliseconds kLongRun{60'000};
constexpr milliseconds kFirstWait{500};
constexpr int kDoNotRestart = 93;

}  // namespace

RestartPolicy::Decision RestartPolicy::after(const Outcome& outcome) {
  now_ += milliseconds{outcome.ran_ms};
  if (outcome.kind == Outcome::Kind::resized) {
    best_step_ = std::max(best_step_, outcome.step);
    return {.restart = true, .text = {}};
  }
  if (outcome.kind != Outcome::Kind::failed || !outcome.restartable || max_restarts_ == 0)
    return {};
  const bool progress =
      outcome.step >= 0 ? outcome.step > best_step_ : milliseconds{outcome.ran_ms} >= kLongRun;
  best_step_ = std::max(best_step_, outcome.step);
  if (starts_++ > 0) without_progress_ = progress ? 0 : without_progress_ + 1;
  if (without_progress_ >= kHopeless) {
    const std::string reached =
        best_step_ >= 0 ? format("no restart got beyond step {}", best_step_) : "each ended soon";
    return {.text = format("giving up after {} restarts without progress: {}", kHopeless, reached),
            .code = kDoNotRestart};
  }
  while (!restarts_.empty() && now_ - restarts_.front() > kHour) restarts_.pop_front();
  const auto used = static_cast<int>(restarts_.size());
  if (used >= max_restarts_)
    return {.text = format("not started again: {} restart{} in the last hour, as many as "
                           "--max-restarts allows",
                           used, used == 1 ? "" : "s")};
  const milliseconds wait =
      without_progress_ == 0 ? milliseconds{0} : kFirstWait * (1 << (without_progress_ - 1));
  now_ += wait;
  restarts_.push_back(now_);
  return {.restart = true,
          .wait = wait,
          .text = format("restart {} of {}{}", used + 1, max_restarts_,
                         wait.count() > 0
                             ? format(", in {:.1f} s", std::chrono::duration<double>(wait).count())
                             : "")};
}

std::string pack(const RestartPolicy::Decision& decision) {
  return format("{} {} {}\n{}", decision.restart ? 1 : 0, decision.wait.count(), decision.code,
                decision.text);
}

std::optional<RestartPolicy::Decision> unpack_decision(std::string_view text) {
  int restart = 0, code = 0;
  long wait = 0;
  const size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string head(text.substr(0, end));
  if (std::sscanf(head.c_str(), "%d %ld %d", &restart, &wait, &code) != 3) return std::nullopt;
  return RestartPolicy::Decision{restart != 0, milliseconds{wait},
                                 std::string(text.substr(end + 1)), code};
}

}  // namespace lockstep::launch
