// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/fault_injection.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fcntl.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/flight/fault_text.h"

namespace lockstep::train {
namespace {

constexpr const char* kVariable = flight::kFaultVariable;
constexpr const char* kRule =
    "rank=R,step=S,action=A[,start=each|once=FILE] or rank=R,message=N,action=flip:BIT or "
    "rank=R[,step=S],sign=N,action=kill|stop, several separated by "
    "';', where A is kill, stop, throw, exit:CODE, sleep:SECONDS, nan, scale:FACTOR, "
    "nan_grad:PARAMETER or flip:TENSOR:ELEMENT:BIT";

[[noreturn]] void refuse(std::string_view text) {
  throw ConfigError(format("{} has '{}', must be {}", kVariable, text, kRule));
}

template <class Number>
Number number_in(const std::string& text, Number most, std::string_view fault) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !(number >= 0) || number > most)
    refuse(fault);
  return number;
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

void parse_action(const std::string& text, std::string_view all, Fault& fault) {
  using Action = Fault::Action;
  const std::vector<std::string> words = flight::parts_of_fault(text, ':');
  const auto is = [&](const char* name, size_t arguments, Action action) {
    if (words[0] != name || words.size() != 1 + arguments) return false;
    fault.action = action;
    return true;
  };
  if (is("kill", 0, Action::kill) || is("stop", 0, Action::stop) || is("throw", 0, Action::raise) ||
      is("nan", 0, Action::nan)) {
    return;
  }
  if (is("exit", 1, Action::exit)) {
    fault.number = static_cast<double>(number_in<int64_t>(words[1], 255, all));
  } else if (is("sleep", 1, Action::sleep)) {
    fault.number = number_in<double>(words[1], 86400, all);
  } else if (is("scale", 1, Action::scale)) {
    fault.number = number_in<double>(words[1], 1e30, all);
  } else if (is("nan_grad", 1, Action::nan_grad) || is("flip", 3, Action::flip)) {
    fault.name = words[1];
    if (fault.name.empty()) refuse(all);
    if (fault.action == Action::nan_grad) return;
    fault.element = number_in(words[2], kMost, all);
    fault.bit = number_in<int64_t>(words[3], 63, all);
  } else {
    refuse(all);
  }
}

bool is_first(const std::string& file) {
  const Fd created(open(file.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  if (!created.valid() && errno != EEXIST)
    throw SystemError(format("{}: cannot make {}", kVariable, file), errno);
  return created.valid();
}

// Through operators, so that it works on every device and in shards.
void flip_bit(const Fault& fault, const checkpoint::NamedSlice& slice) {
  const at::NoGradGuard no_grad;
  if (slice.saving) slice.saving();
  at::Tensor place = slice.tensor;
  const auto bits = static_cast<int64_t>(place.element_size()) * 8;
  if (fault.element >= place.numel() || fault.bit >= bits) {
    throw ConfigError(format("{}: element {} and bit {} of {}, which has {} elements of {} bits",
                             kVariable, fault.element, fault.bit, fault.name, place.numel(), bits));
  }
  int64_t rest = fault.element;
  while (place.dim() > 0) {
    const int64_t inner = place.numel() / place.size(0);
    place = place.select(0, rest / inner);
    rest %= inner;
  }
  const at::Tensor value = place.to(at::kCPU, place.scalar_type(), false, /*copy=*/true);
  static_cast<uint8_t*>(value.data_ptr())[fault.bit / 8] ^=
      static_cast<uint8_t>(1U << (fault.bit % 8));
  place.copy_(value);
  if (slice.loaded) slice.loaded();
}

}  // namespace

std::vector<Fault> parse_faults(std::string_view text) {
  std::vector<Fault> faults;
  for (const flight::FaultText& each : flight::parse_fault_texts(text)) {
    // Those of comm::init and of the flight recorder.
    if (each.has("message") || each.has("sign")) continue;
    size_t known = 3;  // rank, step and action
    Fault fault{.rank = number_in(each.value("rank"), kMost, each.text),
                .step = number_in(each.value("step"), kMost, each.text)};
    if (each.has("start")) {
      if (each.value("start") != "each") refuse(each.text);
      fault.each_start = true;
      ++known;
    }
    if (each.has("once")) {
      fault.once = each.value("once");
      if (fault.once.empty()) refuse(each.text);
      ++known;
    }
    if (each.repeats || each.values.size() != known || !each.has("action") || fault.step == 0)
      refuse(each.text);
    parse_action(each.value("action"), each.text, fault);
    faults.push_back(std::move(fault));
  }
  return faults;
}

FaultInjection::FaultInjection(int rank, int world) {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr) return;
  const bool again = RankEnv::detect().restart_count > 0;
  for (const Fault& fault : parse_faults(text)) {
    if (again && !fault.each_start && fault.once.empty()) continue;
    if (fault.rank >= world && !again) {  // a restart may have fewer
      throw ConfigError(
          format("{} has rank {}, must be below the {} ranks", kVariable, fault.rank, world));
    }
    if (fault.rank == rank) faults_.push_back(fault);
  }
}

// Of several alike, one at a time: a step that is done again can fail again.
std::vector<Fault> FaultInjection::take(int64_t step, bool flips) {
  std::vector<Fault> now;
  std::erase_if(faults_, [&](const Fault& fault) {
    const bool is_flip = fault.action == Fault::Action::flip;
    if (fault.step != step || is_flip != flips || (!flips && !now.empty())) return false;
    if (fault.once.empty() || is_first(fault.once)) now.push_back(fault);
    return true;
  });
  return now;
}

// The hook changes what backward gives to the parameter, before it is averaged.
void FaultInjection::poison(const Fault& fault, const parallel::Pipeline& model) {
  for (const auto& module : model.modules()) {
    const auto parameters = module->named_parameters();
    const at::Tensor* const parameter = parameters.find(fault.name);
    if (parameter == nullptr) continue;
    const unsigned hook = parameter->register_hook([](const at::Tensor& gradient) {
      const at::Tensor bad = gradient.clone(at::MemoryFormat::Contiguous);
      bad.view({-1}).narrow(0, 0, 1).fill_(std::numeric_limits<double>::quiet_NaN());
      return bad;
    });
    hooks_.emplace_back(*parameter, hook);
    return;
  }
  throw ConfigError(format("{}: rank {} has no parameter {}", kVariable, fault.rank, fault.name));
}

double FaultInjection::begin_step(int64_t step, const parallel::Pipeline& model) {
  for (const auto& [tensor, hook] : hooks_) tensor.remove_hook(hook);
  hooks_.clear();
  double factor = 1;
  for (const Fault& fault : take(step, /*flips=*/false)) {
    switch (fault.action) {
      case Fault::Action::kill:
        std::raise(SIGKILL);
        break;
      case Fault::Action::stop:
        std::raise(SIGSTOP);
        break;
      case Fault::Action::exit:
        _exit(static_cast<int>(fault.number));  // as a crash: nothing is unwound
      case Fault::Action::sleep:
        std::this_thread::sleep_for(std::chrono::duration<double>(fault.number));
        break;
      case Fault::Action::raise:
        throw Error(format("{}: rank {} fails in step {}", kVariable, fault.rank, step));
      case Fault::Action::nan:
        factor = std::numeric_limits<double>::quiet_NaN();
        break;
      case Fault::Action::scale:
        factor = fault.number;
        break;
      case Fault::Action::nan_grad:
        poison(fault, model);
        break;
      case Fault::Action::flip:
        break;
    }
  }
  return factor;
}

void FaultInjection::end_step(int64_t step,
                              const std::function<std::vector<checkpoint::NamedSlice>()>& slices) {
  for (const Fault& fault : take(step, /*flips=*/true)) {
    const std::vector<checkpoint::NamedSlice> all = slices();
    const auto found = std::ranges::find_if(all, [&](const checkpoint::NamedSlice& slice) {
      return slice.placement.name == fault.name && !slice.placement.is_empty();
    });
    if (found == all.end())
      throw ConfigError(format("{}: rank {} holds no {}", kVariable, fault.rank, fault.name));
    flip_bit(fault, *found);
  }
}

}  // namespace lockstep::train
