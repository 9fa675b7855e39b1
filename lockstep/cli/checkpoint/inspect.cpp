// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/saved_config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;
using formats::Manifest;
using formats::TensorRecord;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// A line of the table, and what the totals are made of.
struct Row {
  std::string name;
  const TensorRecord* record;
  int64_t elements, bytes, files;

  bool of_optimizer() const { return name.starts_with("optim."); }
};

// Of all tensors, of the model's, or of the optimizer's.
struct Total {
  int64_t tensors = 0, elements = 0, bytes = 0;

  void add(const Row& row) {
    ++tensors;
    elements += row.elements;
    bytes += row.bytes;
  }
};

struct Listed {
  formats::Checkpoint checkpoint;
  int64_t bytes = 0;
  std::string damage = {};  // empty: none that the manifest and the sizes show
};

struct Summary {
  std::string path;
  Manifest manifest;
  std::vector<Listed> listed;  // of a folder of them
  std::vector<Row> rows = {};
  std::vector<std::pair<std::string, int64_t>> files = {};
  Total model = {}, optimizer = {};
  int64_t slices = 0, uncut = 0;
  std::optional<config::TrainConfig> config = std::nullopt;
};

std::vector<Row> rows_of(const Manifest& manifest) {
  std::vector<Row> rows;
  for (const auto& [name, record] : manifest.tensors) {
    std::set<std::string> files;
    for (const auto& slice : record.slices) files.insert(slice.file);
    rows.push_back({name, &record, layout::numel_of(record.shape),
                    formats::byte_size(record.dtype, record.shape).value_or(0),
                    static_cast<int64_t>(files.size())});
  }
  // The model's come before the optimizer's.
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    if (a.of_optimizer() != b.of_optimizer()) return b.of_optimizer();
    return natural_less(a.name, b.name);
  });
  return rows;
}

std::vector<Listed> list(const std::string& dir) {
  std::vector<Listed> listed;
  for (const auto& checkpoint : formats::list_complete(dir)) {
    Listed one{.checkpoint = checkpoint, .bytes = bytes_on_disk(checkpoint.path)};
    try {
      formats::read_manifest(checkpoint.path);
    } catch (const Error& failure) {
      one.damage = failure.what();
    }
    listed.push_back(std::move(one));
  }
  return listed;
}

Summary summarize(const std::string& dir) {
  const std::string path = last_checkpoint(dir);
  Summary summary{.path = path, .manifest = formats::read_manifest(path), .listed = {}};
  if (path != dir) summary.listed = list(config::checkpoint_folder(dir));
  summary.rows = rows_of(summary.manifest);
  for (const Row& row : summary.rows) {
    (row.of_optimizer() ? summary.optimizer : summary.model).add(row);
    summary.slices += static_cast<int64_t>(row.record->slices.size());
    if (row.record->slices.size() == 1) ++summary.uncut;
  }
  for (const auto& [name, record] : summary.manifest.files) {
    summary.files.emplace_back(name, static_cast<int64_t>(record.bytes));
  }
  try {
    summary.config = config::saved_config(summary.manifest, path);
  } catch (const CheckpointError&) {  // one that another program saved has no model to describe
  }
  return summary;
}

// ---- as text ----

using Line = std::array<std::string, 6>;

std::string table(const std::vector<Row>& rows) {
  std::vector<Line> lines{{"tensor", "dtype", "shape", "size", "slices", "files"}};
  for (const Row& row : rows) {
    lines.push_back({row.name, row.record->dtype, layout::describe(row.record->shape),
                     size_text(row.bytes), std::to_string(row.record->slices.size()),
                     std::to_string(row.files)});
  }
  std::array<size_t, 6> widths{};
  for (const Line& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const Line& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      const char* between = i == 0 ? "" : "  ";
      text += i < 3 ? format("{}{:<{}}", between, line[i], widths[i])
                    : format("{}{:>{}}", between, line[i], widths[i]);
    }
    text += '\n';
  }
  return text;
}

std::string line(const char* name, const std::string& text) {
  return format("{:<10} {}\n", name, text);
}

std::string line(const char* name, const Total& total) {
  return line(name, format("{}, {} elements, {}", counted(total.tensors, "tensor"), total.elements,
                           size_text(total.bytes)));
}

std::string layout_text(const Summary& summary) {
  std::string text = format("{}, {}; {} of {} in one piece",
                            counted(static_cast<int64_t>(summary.files.size()), "file"),
                            counted(summary.slices, "slice"), summary.uncut,
                            counted(static_cast<int64_t>(summary.rows.size()), "tensor"));
  if (summary.config) {
    const auto& parallel = summary.config->parallel;
    text += format("; tp {}, pp {}, shard {}", parallel.tp, parallel.pp, name_of(parallel.shard));
  }
  return text;
}

std::string to_text(const Summary& summary) {
  std::string text;
  for (const Listed& one : summary.listed) {
    text += format("{}  step {}  {}{}\n", one.checkpoint.path, one.checkpoint.step,
                   size_text(one.bytes), one.damage.empty() ? "" : "  damaged: " + one.damage);
  }
  if (!text.empty()) text += '\n';
  text += table(summary.rows) + "\n";
  text += line("checkpoint", summary.path);
  text += line("step", std::to_string(summary.manifest.step));
  if (summary.config) text += line("config", summary.config->model.describe());
  text += line("model", summary.model);
  text += line("optimizer", summary.optimizer);
  text += line("layout", layout_text(summary));
  for (const auto& [name, value] : summary.manifest.state)
    text += line("state", format("{} {}", name, value));
  for (const auto& [name, bytes] : summary.files)
    text += line("file", format("{}  {}", name, size_text(bytes)));
  return text;
}

// ---- as JSON ----

Json to_json(const Total& total) {
  return {{"tensors", total.tensors}, {"elements", total.elements}, {"bytes", total.bytes}};
}

Json to_json(const Row& row) {
  Json slices = Json::array();
  for (const auto& slice : row.record->slices) {
    slices.push_back({{"file", slice.file},
                      {"offsets", formats::slice_offsets(row.record->shape, slice.box)},
                      {"shape", formats::slice_shape(row.record->shape, slice.box)}});
  }
  return {{"name", row.name},
          {"dtype", row.record->dtype},
          {"shape", row.record->shape},
          {"bytes", row.bytes},
          {"slices", slices}};
}

std::string to_json(const Summary& summary) {
  Json json = {{"path", summary.path}, {"step", summary.manifest.step}};
  if (!summary.listed.empty()) {
    json["checkpoints"] = Json::array();
    for (const Listed& one : summary.listed) {
      Json entry = {
          {"path", one.checkpoint.path}, {"step", one.checkpoint.step}, {"bytes", one.bytes}};
      if (!one.damage.empty()) entry["damage"] = one.damage;
      json["checkpoints"].push_back(entry);
    }
  }
  if (summary.config) json["describe"] = summary.config->model.describe();
  json["model"] = to_json(summary.model);
  json["optimizer"] = to_json(summary.optimizer);
  json["slices"] = summary.slices;
  json["files"] = Json::array();
  for (const auto& [name, bytes] : summary.files) {
    json["files"].push_back({{"name", name}, {"bytes", bytes}});
  }
  json["state"] = Json::object();
  for (const auto& [name, value] : summary.manifest.state) json["state"][name] = Json::parse(value);
  json["config"] = Json::parse(summary.manifest.config);
  json["tensors"] = Json::array();
  for (const Row& row : summary.rows) json["tensors"].push_back(to_json(row));
  return json.dump(2) + "\n";
}

}  // namespace

int checkpoint_inspect(const Words& arguments) {
  std::string dir;
  bool as_json = false;
  CLI::App app;
  app.add_option("DIR", dir)->required();
  app.add_flag("--json", as_json, "Print one JSON object with the configuration and every slice");
  if (const auto status = parse(
          app, "checkpoint inspect",
          "Shows the contents of a checkpoint: tensors, totals, files and run state.\n"
          "Usage: lockstep checkpoint inspect DIR [--json]\n"
          "DIR is a checkpoint, a run folder, or a folder of checkpoints: inspect lists all and "
          "shows the newest.\n"
          "The exit status is 1 if a manifest or a file size shows damage; verify reads every "
          "byte.\n",
          arguments))
    return *status;
  const Summary summary = summarize(dir);
  std::cout << (as_json ? to_json(summary) : to_text(summary));
  const auto damaged = [](const Listed& one) { return !one.damage.empty(); };
  return std::any_of(summary.listed.begin(), summary.listed.end(), damaged) ? 1 : 0;
}

}  // namespace lockstep::cli
