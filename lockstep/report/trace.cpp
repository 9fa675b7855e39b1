// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/trace.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;
using io::Json;

// Clocks of processes of one host agree but for this, in microseconds.
constexpr double kSameClock = 1000;

// A slice, by the row that it is on.
struct Slice {
  int64_t process = 0, row = 0;
  double start = 0, end = 0;
};
// Messages of one direction between two ranks of a group arrive in the order of sending.
struct Channel {
  std::vector<Slice> sends, receives;
};
using Channels = std::map<std::tuple<std::string, int64_t, int64_t>, Channel>;  // group, from, to

struct Operation {
  Slice called, waited;
  bool has_call = false, has_wait = false;
};

// One event in a line, as core/trace writes them; the last line of a killed process may be cut.
std::string event_in(const std::string& line) {
  const size_t begin = line.find('{'), end = line.rfind('}');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "";
  return line.substr(begin, end - begin + 1);
}

class Merger {
 public:
  explicit Merger(std::ostream& out) : out_(out) { out_ << "[\n"; }

  void add(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw ConfigError(format("report: cannot read {}", path));
    std::unordered_map<uint64_t, Operation> operations;  // by ticket, of this process
    double shift = 0;
    for (std::string line; std::getline(file, line);) {
      const std::string text = event_in(line);
      if (text.empty()) continue;
      Json event = io::parse_json_line(text);
      if (!event.is_object()) continue;
      try {
        if (event.at("ph") == "M") {
          const Json& args = event.at("args");
          if (args.contains("wall_offset_us")) shift = shift_of(args.at("wall_offset_us"));
        } else if (shift != 0) {
          event["ts"] = event.at("ts").get<double>() + shift;
        }
        if (event.at("ph") == "X") read(event, operations);
        write(shift != 0 ? event.dump() : text);
      } catch (const Json::exception&) {  // no event of ours
      }
    }
    for (const auto& [ticket, operation] : operations) {
      if (!operation.has_call || !operation.has_wait) continue;
      flow("completion", operation.called, operation.called.start, operation.waited);
      ++counts_.waits;
    }
  }

  TraceCounts finish() {
    for (auto& [key, channel] : channels_) {
      std::ranges::sort(channel.sends, {}, &Slice::start);
      std::ranges::sort(channel.receives, {}, &Slice::start);
      // A process that was killed has written fewer.
      for (size_t i = 0; i < std::min(channel.sends.size(), channel.receives.size()); ++i) {
        flow("message", channel.sends[i], channel.sends[i].start, channel.receives[i]);
        ++counts_.messages;
      }
    }
    out_ << "\n]\n";
    return counts_;
  }

 private:
  double shift_of(double wall_offset) {
    if (!first_offset_) first_offset_ = wall_offset;
    const double shift = wall_offset - *first_offset_;
    return std::abs(shift) < kSameClock ? 0 : shift;
  }

  void read(const Json& event, std::unordered_map<uint64_t, Operation>& operations) {
    const std::string category = event.value("cat", "");
    if (category != "comm" && category != "wait") return;
    const double start = event.at("ts"), duration = event.at("dur");
    const Slice slice{event.at("pid"), event.at("tid"), start, start + duration};
    const Json& args = event.at("args");
    if (const uint64_t ticket = args.value("ticket", uint64_t{0}); ticket != 0) {
      Operation& operation = operations[ticket];
      const bool waits = category == "wait";
      (waits ? operation.waited : operation.called) = slice;
      (waits ? operation.has_wait : operation.has_call) = true;
    }
    if (category != "comm" || !args.contains("peer")) return;
    const std::string group = args.at("group"), name = event.at("name");
    const int64_t peer = args.at("peer");
    if (name == "send") channels_[{group, slice.process, peer}].sends.push_back(slice);
    if (name == "recv") channels_[{group, peer, slice.process}].receives.push_back(slice);
  }

  void write(const std::string& event) { out_ << (counts_.events++ > 0 ? ",\n" : "") << event; }

  // An arrow from inside one slice to the end of another, which it is bound to.
  void flow(const char* name, const Slice& from, double start, const Slice& to) {
    const uint64_t id = ++last_id_;
    const double end = std::max(to.start, to.end - 0.001);
    write(
        format("{{\"ph\":\"s\",\"cat\":\"flow\",\"name\":\"{}\",\"id\":{},\"pid\":{},\"tid\":{},"
               "\"ts\":{:.3f}}}",
               name, id, from.process, from.row, start));
    write(
        format("{{\"ph\":\"f\",\"bp\":\"e\",\"cat\":\"flow\",\"name\":\"{}\",\"id\":{},\"pid\":{},"
               "\"tid\":{},\"ts\":{:.3f}}}",
               name, id, to.process, to.row, end));
  }

  std::ostream& out_;
  TraceCounts counts_;
  Channels channels_;
  std::optional<double> first_offset_;
  uint64_t last_id_ = 0;
};

}  // namespace

std::vector<std::vector<std::string>> trace_files(const std::string& named) {
  const std::string folder = fs::is_directory(named + "/traces") ? named + "/traces" : named;
  struct Files {
    std::vector<std::string> paths = {};
    fs::file_time_type newest = fs::file_time_type::min();
  };
  // Files whose names do not say their run are one.
  std::map<std::string, Files> runs;
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(folder, failure)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".json" || !entry.is_regular_file()) continue;
    Files& run = runs[name.starts_with("run") ? name.substr(0, name.find('-')) : ""];
    run.paths.push_back(entry.path().string());
    run.newest = std::max(run.newest, entry.last_write_time());
  }
  std::vector<Files> sorted;
  for (auto& [name, run] : runs) {
    std::ranges::sort(run.paths);
    sorted.push_back(std::move(run));
  }
  std::ranges::stable_sort(sorted, std::greater<>(), &Files::newest);
  std::vector<std::vector<std::string>> files;
  for (Files& run : sorted) files.push_back(std::move(run.paths));
  return files;
}

TraceCounts merge_traces(const std::vector<std::string>& files, std::ostream& out) {
  Merger merger(out);
  for (const std::string& file : files) merger.add(file);
  return merger.finish();
}

}  // namespace lockstep::report
