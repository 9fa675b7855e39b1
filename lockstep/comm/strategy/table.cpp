// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/strategy/table.h"

#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/log.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/io/json.h"

namespace lockstep::comm::strategy {
namespace {

using fabric::OpKind;
using layout::CommStrategy;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr std::array kKinds = {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather,
                               OpKind::broadcast};

std::string machine() { return format("{}, {} cores", host_name(), sysconf(_SC_NPROCESSORS_ONLN)); }

OpKind kind_of(const std::string& name) {
  for (const OpKind kind : kKinds) {
    if (name == fabric::name_of(kind)) return kind;
  }
  throw ConfigError(format("operation '{}' has no strategies", name));
}

// The whole file, checked: every table in it can be read. Throws ConfigError with the reason.
Json parse_file(const std::string& text) {
  try {
    Json file = io::parse_user_json(text, "its text");
    if (file.at("format") != kFormat)
      throw ConfigError(format("its format is {}, must be {}", file["format"].dump(), kFormat));
    if (file.at("machine") != machine()) {
      throw ConfigError(
          format("it was measured on {}, this is \"{}\"", file["machine"].dump(), machine()));
    }
    for (const auto& [key, table] : file.at("tables").items()) Table::from_json(table.dump());
    return file;
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(error.what());
  }
}

std::string read_file(const std::string& path) {
  return fs::exists(path) ? read_text(path, io::kMaxJsonBytes) : "";
}

// All tables of this machine as one JSON object, or nothing.
std::string read_tables() {
  const std::string path = table_path();
  if (path.empty()) return "";
  try {
    const std::string text = read_file(path);
    return text.empty() ? "" : parse_file(text)["tables"].dump();
  } catch (const Error& error) {
    log::warn(format("{} is ignored: {}; `lockstep bench collectives --calibrate` writes a new one",
                     path, error.what()));
    return "";
  }
}

}  // namespace

Table Table::always(CommStrategy strategy) {
  Table table;
  table.otherwise_ = strategy;
  return table;
}

void Table::add(OpKind kind, int64_t bytes, CommStrategy strategy) {
  rows_[kind][bytes] = strategy;
}

CommStrategy Table::choose(OpKind kind, int64_t bytes) const {
  const auto found = rows_.find(kind);
  if (found == rows_.end() || found->second.empty()) return otherwise_;
  const auto& rows = found->second;
  const auto above = rows.lower_bound(bytes);
  if (above == rows.end()) return std::prev(above)->second;
  if (above == rows.begin()) return above->second;
  const auto below = std::prev(above);
  const double middle =
      std::sqrt(static_cast<double>(below->first) * static_cast<double>(above->first));
  return static_cast<double>(bytes) < middle ? below->second : above->second;
}

std::set<CommStrategy> Table::strategies() const {
  std::set<CommStrategy> all{otherwise_};
  for (const auto& [kind, rows] : rows_) {
    for (const auto& [bytes, strategy] : rows) all.insert(strategy);
  }
  all.erase(CommStrategy::all_reduce);
  return all;
}

std::string Table::to_json() const {
  Json json = Json::object();
  for (const auto& [kind, rows] : rows_) {
    Json& list = json[std::string(fabric::name_of(kind))] = Json::array();
    for (const auto& [bytes, strategy] : rows) list.push_back({bytes, layout::name_of(strategy)});
  }
  return json.dump();
}

Table Table::from_json(const std::string& text) {
  Table table;
  try {
    const Json json = io::parse_user_json(text, "a table");
    for (const auto& [name, rows] : json.items()) {
      const OpKind kind = kind_of(name);
      for (const auto& row : rows) {
        const auto bytes = row.at(0).get<int64_t>();
        const auto strategy = layout::parse_comm_strategy(row.at(1).get<std::string>());
        if (bytes < 1 || strategy == CommStrategy::adaptive)
          throw ConfigError(
              format("{} {} is no row of {}", bytes, layout::name_of(strategy), name));
        table.add(kind, bytes, strategy);
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(error.what());
  }
  return table;
}

std::string table_path() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0')
    return format("{}/lockstep/collectives.json", cache);
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    return format("{}/.cache/lockstep/collectives.json", home);
  return "";
}

void save_table(const std::string& path, const std::string& key, const Table& table) {
  if (path.empty())
    throw ConfigError("neither XDG_CACHE_HOME nor HOME is set: there is no place for the table");
  Json file;
  try {
    file = parse_file(read_file(path));
  } catch (const ConfigError&) {  // none, or of no use
    file = {{"format", kFormat}, {"machine", machine()}, {"tables", Json::object()}};
  }
  file["tables"][key] = Json::parse(table.to_json());
  fs::create_directories(fs::path(path).parent_path());
  // A concurrent reader finds the old file or the new one.
  const std::string draft = format("{}.{}", path, getpid());
  std::ofstream stream(draft);
  stream << file.dump(1) << "\n";
  stream.close();
  if (!stream) throw SystemError("cannot write " + draft, errno);
  fs::rename(draft, path);
}

Table shared_table(const detail::Membership& membership, const std::string& key,
                   bool has_hierarchy) {
  detail::World& world = *membership.world;
  if (!world.strategy_tables) {
    const std::string name = "strategies/" + membership.name;
    if (membership.rank == 0) world.store->set(name, read_tables());
    world.strategy_tables = world.store->get(name, Deadline(world.timeout));
  }
  if (!world.strategy_tables->empty()) {
    const Json tables = io::parse_user_json(*world.strategy_tables, "the tables");
    if (tables.contains(key)) {
      Table table = Table::from_json(tables[key].dump());
      if (has_hierarchy || table.strategies().count(CommStrategy::hierarchical) == 0) return table;
    }
  }
  return has_hierarchy ? Table::always(CommStrategy::hierarchical) : Table();
}

}  // namespace lockstep::comm::strategy
