// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/run.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "lockstep/config/run_folder.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/flight/dump.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;
using io::Json;

constexpr size_t kMostEvents = 400;  // of a kind
constexpr size_t kMostSamples = 64, kMostHealth = 128, kMostStarts = 32, kRanksRead = 1024;
constexpr size_t kRowsOfRanks = 256;
constexpr size_t kLongestLine = size_t{64} << 20;

double number_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : kNone;
}

std::string text_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

int64_t whole(double step) {
  return std::isfinite(step) && std::abs(step) < 9e15 ? static_cast<int64_t>(step) : 0;
}

int64_t step_in(const Json& object) { return whole(number_in(object, "step")); }

// Calls `take` with each line that is a JSON object; the others are counted. A line that a running
// job has not finished is not bad.
void read_lines(const std::string& path, int64_t& bad,
                const std::function<void(const Json&)>& take) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.size() > kLongestLine) continue;
    const Json json = io::parse_json_line(line);
    if (json.is_object()) {
      take(json);
    } else if (!file.eof()) {
      ++bad;
    }
  }
}

// Every second one goes where there are too many, so that the rest covers the whole run.
template <class T>
void thin(std::vector<T>& items, size_t most) {
  if (items.size() < most) return;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); i += 2) std::swap(items[kept++], items[i]);
  items.resize(kept);
}

void add_ranks(Run& run, const MetricsLine& line) {
  if (line.busy_ms.size() < 2) return;
  std::vector<double> values{line.values[kStep]};
  values.insert(values.end(), line.busy_ms.begin(), line.busy_ms.end());
  // A run may be resumed with another number of ranks: the last counts.
  if (run.peak_bytes.size() != line.busy_ms.size() || run.busy.count() == 0)
    run.busy = Series(values.size(), kRowsOfRanks);
  run.busy.add(values);
  run.peak_bytes = line.peak_bytes;
  run.peak_bytes.resize(line.busy_ms.size(), kNone);
}

void add_metrics(Run& run, const MetricsLine& line) {
  if (line.is_validation) {
    run.validations.push_back(
        {whole(line.values[kStep]), line.validation_loss, line.values[kTime]});
    return thin(run.validations, 4096);
  }
  if (!line.has_loss) return;
  run.steps.add(line.values);
  add_ranks(run, line);
}

void read_metrics(Run& run, const std::string& path) {
  std::ifstream file(path);
  MetricsLine parsed;
  for (std::string line; std::getline(file, line);) {
    if (line.empty()) continue;
    if (parsed.parse(line)) {
      add_metrics(run, parsed);
    } else if (!file.eof()) {  // the last may be in the making
      ++run.bad_lines;
    }
  }
}

std::array<double, 5> memory_in(const Json& object, const char* key) {
  std::array<double, 5> kinds{};
  const auto found = object.find(key);
  if (found == object.end() || !found->is_object()) return kinds;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const double bytes = number_in(*found, std::string(kMemoryNames[i]).c_str());
    kinds[i] = std::isfinite(bytes) ? bytes : 0;
  }
  return kinds;
}

void add_health(Run& run, const Json& line) {
  Health& health = run.health;
  const auto layers = line.find("layers");
  if (layers == line.end() || !layers->is_array() || layers->size() > 4096) return;
  std::vector<std::string> names;
  for (const Json& name : *layers)
    names.push_back(name.is_string() ? name.get<std::string>() : "?");
  if (names != health.layers) health = {.layers = names};
  health.steps.push_back(step_in(line));
  for (const auto& [key, values] : line.items()) {
    if (!values.is_array() || key == "layers") continue;
    std::vector<double> numbers;
    for (const Json& value : values)
      numbers.push_back(value.is_number() ? value.get<double>() : kNone);
    numbers.resize(names.size(), kNone);
    health.values[key].push_back(std::move(numbers));
  }
  if (health.steps.size() < kMostHealth) return;
  thin(health.steps, kMostHealth);
  for (auto& [key, rows] : health.values) thin(rows, kMostHealth);
}

void add_operations(Run& run, const Json& line) {
  const auto operations = line.find("operations");
  if (operations == line.end() || !operations->is_object()) return;
  run.steps_of_operations += std::fmax(0, number_in(line, "steps"));
  for (const auto& [name, cost] : operations->items()) {
    if (!cost.is_object() || run.operations.size() > 64) continue;
    OperationCost& total = run.operations[name];
    total.count += std::fmax(0, number_in(cost, "count"));
    total.bytes += std::fmax(0, number_in(cost, "bytes"));
    total.flight_ms += std::fmax(0, number_in(cost, "flight_ms"));
    total.waited_ms += std::fmax(0, number_in(cost, "waited_ms"));
  }
}

std::string words_of(const std::string& kind, const Json& line) {
  if (kind == "started") {
    const std::string from = text_in(line, "resumed_from");
    return format("{:.0f} ranks{}", number_in(line, "ranks"),
                  from.empty() ? "" : ", resumed from " + from);
  }
  if (kind == "world") {
    const std::string lost = text_in(line, "lost");
    return format("{:.0f} ranks ({}), where {:.0f} were{}", number_in(line, "ranks"),
                  text_in(line, "layout"), number_in(line, "from"),
                  lost.empty() ? "" : ", without " + lost);
  }
  if (kind == "saved")
    return format("{} in {:.1f} s", text_in(line, "path"), number_in(line, "seconds"));
  if (kind == "slow")
    return format("rank {:.0f} computed for {:.0f} ms, the others for {:.0f} ms",
                  number_in(line, "rank"), number_in(line, "busy_ms"), number_in(line, "usual_ms"));
  if (kind == "rolled back") return format("to step {:.0f}", number_in(line, "to"));
  return text_in(line, "text");
}

void add_event(Run& run, const Json& line) {
  const std::string kind = text_in(line, "event");
  if (kind == "communication") return add_operations(run, line);
  if (kind == "health") return add_health(run, line);
  if (kind == "sample") {
    run.samples.push_back({step_in(line), text_in(line, "prompt"), text_in(line, "text")});
    return thin(run.samples, kMostSamples);
  }
  if (kind == "ranks") {
    const auto ranks = line.find("ranks");
    if (ranks == line.end() || !ranks->is_array() || ranks->size() > kRanksRead) return;
    run.memory.clear();
    for (const Json& rank : *ranks)
      run.memory.push_back({memory_in(rank, "memory"), memory_in(rank, "plan")});
    run.pipeline = line.contains("schedule") ? line : Json();
    return;
  }
  if (kind.empty() || run.counts.size() > 64) return;
  if (kind == "started" || kind == "finished" || kind == "stopped" || kind == "failed") {
    run.state = kind == "started" ? "running" : kind;
    run.failure = kind == "failed" ? text_in(line, "text") : "";
  }
  ++run.counts[kind];
  run.events.push_back({kind, step_in(line), number_in(line, "time"), words_of(kind, line)});
  if (run.counts[kind] <= static_cast<int64_t>(kMostEvents)) return;
  run.events.erase(std::ranges::find(run.events, kind, &Event::kind));
}

// Of the last start: whether its rank 0 is alive. On another host this cannot be seen; there the
// time of the last line decides.
bool is_alive(const Run& run) {
  if (run.starts.empty()) return false;
  const auto ranks = run.starts.back().find("ranks");
  if (ranks == run.starts.back().end() || !ranks->is_array() || ranks->empty()) return false;
  const Json& first = (*ranks)[0];
  if (text_in(first, "host") == host_name()) {
    const double pid = number_in(first, "pid");
    return pid > 0 && (kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM);
  }
  std::error_code error;
  const auto written = fs::last_write_time(run.path + "/metrics.jsonl", error);
  return !error && fs::file_time_type::clock::now() - written < std::chrono::minutes(10);
}

// Every key of config.toml as text, for differences between runs.
std::map<std::string, std::string> read_settings(const std::string& path) {
  std::map<std::string, std::string> settings;
  std::ifstream file(path);
  std::string section;
  for (std::string line; std::getline(file, line) && settings.size() < 1000;) {
    if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
    const size_t equals = line.find(" = ");
    if (line.starts_with('#') || equals == std::string::npos) continue;
    // Behind a "#" is who has set it.
    std::string value = line.substr(equals + 3);
    if (const size_t comment = value.rfind(" # "); comment != std::string::npos)
      value.resize(value.find_last_not_of(' ', comment) + 1);
    settings[section + "." + line.substr(0, equals)] = value;
  }
  return settings;
}

}  // namespace

std::string metrics_file(const Run& run) {
  if (run.config && run.config->metrics.file != "auto" && !run.config->metrics.file.empty())
    return run.config->metrics.file;
  return run.path + "/metrics.jsonl";
}

double RankMemory::sum(const std::array<double, 5>& kinds) {
  double all = 0;
  for (const double kind : kinds) all += kind;
  return all;
}

int Run::ranks() const {
  if (!peak_bytes.empty()) return static_cast<int>(peak_bytes.size());
  if (!memory.empty()) return static_cast<int>(memory.size());
  const double world = starts.empty() ? kNone : number_in(starts.back(), "world_size");
  return world >= 1 && world < 1e6 ? static_cast<int>(world) : 1;
}

double Run::flops_per_token() const {
  if (!config) return kNone;
  const config::ModelSpec& model = config->model;
  if (model.vocab <= 0) return kNone;
  try {
    // Attention of packed rows is that of their documents, whose lengths are not recorded: the
    // utilization is a lower bound then.
    const int64_t seen = config->data.pack ? 0 : config->train.seq_len;
    return 6.0 * static_cast<double>(model.parameters()) +
           12.0 * static_cast<double>(model.layers * model.heads * model.head_size()) *
               static_cast<double>(seen);
  } catch (const Error&) {
    return kNone;
  }
}

double Run::peak_flops() const {
  // Dense products without sparsity: bfloat16, and float32 by tensor cores (TF32).
  struct Device {
    std::string_view name;
    double bfloat16, float32;
  };
  static constexpr std::array<Device, 9> kDevices{{{"H200", 989e12, 494e12},
                                                   {"H100 PCIe", 756e12, 378e12},
                                                   {"H100", 989e12, 494e12},
                                                   {"GH200", 989e12, 494e12},
                                                   {"B200", 2250e12, 1100e12},
                                                   {"A100", 312e12, 156e12},
                                                   {"L40S", 362e12, 183e12},
                                                   {"RTX 4090", 165e12, 82e12},
                                                   {"RTX 3090", 71e12, 35e12}}};
  if (starts.empty()) return kNone;
  const auto ranks = starts.back().find("ranks");
  if (ranks == starts.back().end() || !ranks->is_array()) return kNone;
  const bool half = config && config->train.type() != config::Precision::float32;
  double sum = 0;
  std::set<std::string> devices;  // ranks may share one
  for (const Json& rank : *ranks) {
    if (!rank.is_object()) return kNone;
    const double measured = number_in(rank, "gflops");
    if (std::isfinite(measured)) {
      sum += 1e9 * measured;
      continue;
    }
    const std::string name = text_in(rank, "name");
    const auto known = std::ranges::find_if(kDevices, [&](const Device& device) {
      return name.find(device.name) != std::string::npos;
    });
    if (known == kDevices.end()) return kNone;
    if (devices.insert(text_in(rank, "host") + text_in(rank, "device")).second)
      sum += half ? known->bfloat16 : known->float32;
  }
  return sum > 0 ? sum : kNone;
}

double Run::mfu(double tokens_per_s) const {
  return tokens_per_s * flops_per_token() / peak_flops();
}

double Run::hours(double time) const { return (time - steps.min(kTime)) / 3600; }

bool is_run(const std::string& folder) {
  std::error_code error;
  return config::is_run_folder(folder) || fs::exists(folder + "/metrics.jsonl", error);
}

Run read_run(const std::string& folder, size_t rows) {
  if (!fs::is_directory(folder)) throw ConfigError(format("report: {} is not a folder", folder));
  if (!is_run(folder)) {
    throw ConfigError(format(
        "report: {} is no run folder: it has neither config.toml nor metrics.jsonl", folder));
  }
  Run run;
  run.steps = Series(kColumns, rows);
  const fs::path path = fs::absolute(folder).lexically_normal();
  run.path = path.string();
  run.name = (path.has_filename() ? path : path.parent_path()).filename().string();
  run.settings = read_settings(config::run_config_file(folder));
  try {
    if (config::is_run_folder(folder)) run.config = config::read_run_config(folder);
  } catch (const Error&) {  // of another version: its settings are shown as they are
  }
  read_lines(folder + "/environment.jsonl", run.bad_lines, [&](const Json& line) {
    ++run.num_starts;
    run.starts.push_back(line);
    if (run.starts.size() > kMostStarts) run.starts.erase(run.starts.begin());
  });
  read_metrics(run, metrics_file(run));
  read_lines(folder + "/events.jsonl", run.bad_lines,
             [&](const Json& line) { add_event(run, line); });
  if (run.state.empty()) run.state = "running";
  if (run.state == "running" && !is_alive(run)) run.state = "died";
  try {
    run.flights = flight::read_dumps(folder);
  } catch (const ConfigError&) {  // there are none
  }
  return run;
}

std::vector<std::string> runs_in(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_run(entry->path().string())) found.push_back(entry->path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace lockstep::report
