// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/schema/option_value.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_diff.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;
using formats::Manifest;
using formats::TensorRecord;
using SortedJson = nlohmann::json;

constexpr const char* kDiffHelp =
    "Compares two checkpoints: step, run state, configuration, tensors and values. Their layouts "
    "may differ.\n"
    "Usage: lockstep checkpoint diff A B [--tolerance X] [--model]\n"
    "A and B are checkpoints, or folders of checkpoints, which means the newest. The exit status "
    "is 0 if\n"
    "step and tensors are bit-identical, else 1. Run state and configuration do not affect it.\n";

struct DiffOptions {
  std::optional<double> tolerance;
  bool model = false;
};

// Values by key: "parallel.tp".
std::map<std::string, std::string> flat(const std::string& json) {
  std::map<std::string, std::string> values;
  const SortedJson flattened = SortedJson::parse(json).flatten();
  for (const auto& [pointer, value] : flattened.items()) {
    std::string key = pointer.empty() ? pointer : pointer.substr(1);
    std::replace(key.begin(), key.end(), '/', '.');
    values[key] = value.dump();
  }
  return values;
}

std::map<std::string, std::string> flat_state(const Manifest& manifest) {
  std::map<std::string, std::string> values;
  for (const auto& [name, json] : manifest.state) {
    for (const auto& [key, value] : flat(json)) {
      values[key.empty() ? name : format("{}.{}", name, key)] = value;
    }
  }
  return values;
}

void print_changes(const char* what, const std::map<std::string, std::string>& a,
                   const std::map<std::string, std::string>& b) {
  std::set<std::string> keys;
  for (const auto* side : {&a, &b}) {
    for (const auto& [key, value] : *side) keys.insert(key);
  }
  const auto text = [](const auto& side, const std::string& key) {
    const auto found = side.find(key);
    return found == side.end() ? std::string("not set") : found->second;
  };
  for (const std::string& key : keys) {
    const std::string x = text(a, key), y = text(b, key);
    if (x != y) std::cout << format("{} {}: {} and {}\n", what, key, x, y);
  }
}

// Names of a tensor in either, in the order that people expect.
Words names_of(const Manifest& a, const Manifest& b, bool model) {
  std::set<std::string> names;
  for (const auto* manifest : {&a, &b}) {
    for (const auto& [name, record] : manifest->tensors) {
      if (!model || !name.starts_with("optim.")) names.insert(name);
    }
  }
  Words sorted(names.begin(), names.end());
  std::sort(sorted.begin(), sorted.end(), natural_less);
  return sorted;
}

std::string describe(const TensorRecord& record) {
  return format("{} {}", record.dtype, layout::describe(record.shape));
}

class Comparison {
 public:
  Comparison(const std::string& a, const std::string& b, const DiffOptions& options)
      : a_(a), b_(b), options_(options) {}

  bool run() {
    const Manifest &a = a_.manifest(), &b = b_.manifest();
    std::cout << format("A: {}\nB: {}\n", a_.path(), b_.path());
    if (a.step != b.step) std::cout << format("step: {} and {}\n", a.step, b.step);
    print_changes("state", flat_state(a), flat_state(b));
    print_changes("config", flat(a.config), flat(b.config));
    const Words names = names_of(a, b, options_.model);
    for (const std::string& name : names) compare_tensor(name);
    std::cout << summary(names.size());
    return different_ == 0 && (options_.model || a.step == b.step);
  }

 private:
  void compare_tensor(const std::string& name) {
    const auto a = a_.manifest().tensors.find(name), b = b_.manifest().tensors.find(name);
    if (a == a_.manifest().tensors.end() || b == b_.manifest().tensors.end()) {
      const bool in_a = a != a_.manifest().tensors.end();
      std::cout << format("{}: {}, only in {}\n", name, describe((in_a ? a : b)->second),
                          in_a ? "A" : "B");
      ++different_;
      return;
    }
    if (a->second.shape != b->second.shape) {
      std::cout << format("{}: {} and {}\n", name, describe(a->second), describe(b->second));
      ++different_;
      return;
    }
    const bool one_type = a->second.dtype == b->second.dtype;
    const auto found = formats::compare(a_, b_, name, {.tolerance = options_.tolerance});
    nan_a_ += found.nan_a;
    nan_b_ += found.nan_b;
    elements_ += found.elements;
    if (found.differing > 0 || !one_type) print_values(name, a->second, b->second, found);
    if (found.differing > 0 || (!one_type && !options_.tolerance)) ++different_;
  }

  static void print_values(const std::string& name, const TensorRecord& a, const TensorRecord& b,
                           const formats::TensorDifference& found) {
    std::string text = format("{}: {}", name, describe(a));
    if (a.dtype != b.dtype) text += format(" and {}", b.dtype);
    text += format(": {} of {} differ", found.differing, counted(found.elements, "element"));
    if (found.differing > 0) {
      text += format(", by {:.3g} at most, {:.3g} relative", found.absolute, found.relative);
    }
    if (found.nan_a + found.nan_b > 0) {
      text += format("; NaN: {} and {}", found.nan_a, found.nan_b);
    }
    std::cout << text << "\n";
  }

  std::string summary(size_t tensors) const {
    std::string text = format("{}, {} compared: ", counted(static_cast<int64_t>(tensors), "tensor"),
                              counted(elements_, "element"));
    if (different_ > 0) {
      text += format("{} differ{}", counted(different_, "tensor"), different_ == 1 ? "s" : "");
    } else {
      text += options_.tolerance ? format("all within {}", *options_.tolerance) : "all are equal";
    }
    if (nan_a_ + nan_b_ > 0) text += format("; NaN: {} in A, {} in B", nan_a_, nan_b_);
    return text + "\n";
  }

  formats::CheckpointReader a_, b_;
  DiffOptions options_;
  int64_t different_ = 0, elements_ = 0, nan_a_ = 0, nan_b_ = 0;
};

}  // namespace

int checkpoint_diff(const Words& arguments) {
  std::string a, b, tolerance;
  DiffOptions options;
  CLI::App app;
  app.add_option("A", a)->required();
  app.add_option("B", b)->required();
  app.add_option("--tolerance", tolerance,
                 "Treat values as equal that differ by at most this, even if their types differ. "
                 "NaN equals NaN");
  app.add_flag("--model", options.model,
               "Compare only the model: ignore the optimizer's tensors and the step");
  if (const auto status = parse(app, "checkpoint diff", kDiffHelp, arguments)) return *status;
  if (!tolerance.empty()) {
    options.tolerance = config::parse_number(tolerance);
    if (!options.tolerance || *options.tolerance < 0) {
      throw ConfigError(
          format("checkpoint diff: --tolerance is '{}', must be a number, 0 or more", tolerance));
    }
  }
  Comparison comparison(config::checkpoint_at(a), config::checkpoint_at(b), options);
  return comparison.run() ? 0 : 1;
}

}  // namespace lockstep::cli
