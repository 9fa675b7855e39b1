// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/dump.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <tuple>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/json.h"

namespace lockstep::flight {
namespace {

namespace fs = std::filesystem;
using io::Json;
using io::OrderedJson;

constexpr const char* kFormat = "lockstep flight recorder 1";
constexpr int kMaxDepth = 3;  // RUN/attempt_0/flight-rank0.json

const std::vector<std::pair<Phase, std::string>>& phases() {
  static const auto table = [] {
    std::vector<std::pair<Phase, std::string>> names;
    for (uint32_t i = 0; i <= static_cast<uint32_t>(Phase::ended); ++i)
      names.emplace_back(static_cast<Phase>(i), name_of(static_cast<Phase>(i)));
    return names;
  }();
  return table;
}

Phase parse_phase(const std::string& text) {
  for (const auto& [phase, name] : phases()) {
    if (name == text) return phase;
  }
  throw Json::other_error::create(501, "unknown phase '" + text + "'", nullptr);
}

Flight parse(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(format("{} is not a dump of the flight recorder: {}", path, why));
  };
  Flight flight;
  try {
    const Json json = io::parse_json(read_text(path, io::kMaxJsonBytes), path);
    if (!json.is_object() || json.value("format", "") != kFormat)
      refuse(format("it must be an object with \"format\": \"{}\"", kFormat));
    json.at("rank").get_to(flight.rank);
    json.at("world").get_to(flight.world);
    json.at("pid").get_to(flight.pid);
    json.at("host").get_to(flight.host);
    json.at("generation").get_to(flight.generation);
    json.at("taken_at").get_to(flight.taken_at);
    json.at("clock_offset").get_to(flight.clock_offset);
    json.at("step").get_to(flight.step);
    json.at("step_at").get_to(flight.step_at);
    json.at("saved_step").get_to(flight.saved_step);
    flight.phase = parse_phase(json.at("phase").get<std::string>());
    json.at("failure").get_to(flight.failure);
    json.at("end").get_to(flight.end);
    json.at("ended_at").get_to(flight.ended_at);
    json.at("stacks").get_to(flight.stacks);
    json.at("step_ns").get_to(flight.step_ns);
    json.at("blocked_ns").get_to(flight.blocked_ns);
    for (const Json& group : json.at("groups"))
      flight.groups.push_back({group.at("name").get<std::string>(), group.at("size").get<int>(),
                               group.at("calls").get<uint32_t>()});
    for (const Json& entry : json.at("operations")) {
      flight.operations.push_back({.group = entry.at("group").get<std::string>(),
                                   .name = entry.at("operation").get<std::string>(),
                                   .dtype = entry.at("dtype").get<std::string>(),
                                   .tag = entry.at("tag").get<std::string>(),
                                   .ticket = entry.at("ticket").get<uint64_t>(),
                                   .number = entry.at("number").get<uint32_t>(),
                                   .peer = entry.at("peer").get<int>(),
                                   .message = entry.at("message").get<bool>(),
                                   .count = entry.at("count").get<int64_t>(),
                                   .began = entry.at("began").get<int64_t>(),
                                   .waited = entry.at("waited").get<int64_t>(),
                                   .ended = entry.at("ended").get<int64_t>()});
    }
  } catch (const Json::exception& failure) {
    refuse(io::reason_of(failure));
  } catch (const CheckpointError& failure) {
    refuse(failure.what());
  }
  return flight;
}

}  // namespace

std::string dump_path(const std::string& folder, int rank) {
  return format("{}/flight-rank{}.json", folder, rank);
}

void write_dump(const std::string& folder, int rank, const Flight& flight) {
  const OrderedJson head{{"format", kFormat},
                         {"rank", flight.rank},
                         {"world", flight.world},
                         {"pid", flight.pid},
                         {"host", flight.host},
                         {"generation", flight.generation},
                         {"taken_at", flight.taken_at},
                         {"clock_offset", flight.clock_offset},
                         {"step", flight.step},
                         {"step_at", flight.step_at},
                         {"saved_step", flight.saved_step},
                         {"phase", name_of(flight.phase)},
                         {"failure", flight.failure},
                         {"end", flight.end},
                         {"ended_at", flight.ended_at},
                         {"stacks", flight.stacks},
                         {"step_ns", flight.step_ns},
                         {"blocked_ns", flight.blocked_ns}};
  const auto dumped = [](const OrderedJson& json) {
    return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  };
  std::string text = dumped(head);
  text.pop_back();
  text += ",\n\"groups\":[";
  const char* separator = "\n";
  for (const GroupUse& group : flight.groups) {
    text +=
        separator + dumped({{"name", group.name}, {"size", group.size}, {"calls", group.calls}});
    separator = ",\n";
  }
  text += "],\n\"operations\":[";
  separator = "\n";
  for (const Operation& operation : flight.operations) {
    text += separator + dumped({{"ticket", operation.ticket},
                                {"group", operation.group},
                                {"operation", operation.name},
                                {"number", operation.number},
                                {"dtype", operation.dtype},
                                {"count", operation.count},
                                {"tag", operation.tag},
                                {"peer", operation.peer},
                                {"message", operation.message},
                                {"began", operation.began},
                                {"waited", operation.waited},
                                {"ended", operation.ended}});
    separator = ",\n";
  }
  text += "]}\n";
  io::make_folders(folder);
  io::write_text(dump_path(folder, rank), text);
}

std::vector<Flight> read_dumps(const std::string& folder) {
  if (!fs::is_directory(folder)) throw ConfigError(format("report: {} is not a folder", folder));
  static const std::regex name("flight-rank[0-9]+\\.json");
  struct Found {
    fs::file_time_type newest = fs::file_time_type::min();
    std::vector<std::string> files = {};
  };
  std::map<std::string, Found> folders;
  std::error_code unreadable;
  for (fs::recursive_directory_iterator item(folder, fs::directory_options::skip_permission_denied,
                                             unreadable);
       item != fs::recursive_directory_iterator(); item.increment(unreadable)) {
    if (item.depth() >= kMaxDepth) item.disable_recursion_pending();
    if (!std::regex_match(item->path().filename().string(), name)) continue;
    Found& found = folders[item->path().parent_path().string()];
    found.files.push_back(item->path().string());
    found.newest = std::max(found.newest, fs::last_write_time(item->path(), unreadable));
  }
  if (folders.empty()) {
    throw ConfigError(
        format("report: {} has no dump of the flight recorder (flight-rank<R>.json); one is "
               "written when a "
               "job fails or hangs, and on SIGUSR2 to its launcher",
               folder));
  }
  // File systems count in milliseconds: of attempts within one, the one with the higher number.
  const auto newest = std::ranges::max_element(folders, {}, [](const auto& found) {
    return std::tuple(found.second.newest, found.first.size(), found.first);
  });
  std::vector<Flight> flights;
  for (const std::string& file : newest->second.files) flights.push_back(parse(file));
  std::ranges::sort(flights, {}, &Flight::rank);
  return flights;
}

}  // namespace lockstep::flight
