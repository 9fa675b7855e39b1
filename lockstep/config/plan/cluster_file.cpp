// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/cluster_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "lockstep/config/schema/schema.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/require.h"
#include "lockstep/core/version.h"

namespace lockstep::config {
namespace {

using plan::Collective;
using plan::MeasuredCollective;

constexpr uint64_t kMostBytes = uint64_t{64} << 20;

struct Texts {
  std::string base = {}, collectives = {};
};

// Without a base these have no default.
constexpr std::array kRequired{"device.flops", "device.memory", "device.bandwidth",
                               "links.host_bandwidth", "links.network_bandwidth"};

Schema cluster_schema(ClusterFile& file, Texts& texts) {
  const Limits positive{.min = 0, .above_min = true}, not_negative{.min = 0};
  const Limits part{.min = 0, .max = 10, .above_min = true}, fraction{.min = 0, .max = 1};
  plan::Cluster& c = file.cluster;
  Schema schema;
  schema.section("cluster", "Cluster");
  schema.add("name", c.name, "Name of the cluster.");
  schema.add("note", c.note, "Where the numbers come from.");
  schema.add("base", texts.base, "Shipped description that this one changes: a100, h100 or h200.");
  schema.add("devices_per_node", c.devices_per_node, "Devices of a host.", {.min = 1, .max = 4096});
  schema.add("error", c.error, "Expected error of predictions, in parts.", fraction);
  schema.add("collectives", texts.collectives,
             "Files of measured collectives, separated by commas.");
  schema.section("machine", "Measured machine");
  schema.add("host", file.host, "Host that was measured.");
  schema.add("build", file.build, "Build of Lockstep that measured it.");
  schema.add("date", file.date, "Day of the measurement.");
  schema.section("device", "Device");
  schema.add("name", c.device.name, "Name of the device.");
  schema.add("flops", c.device.flops, "Dense peak in FLOP per second.", positive);
  schema.add("memory", c.device.memory, "Bytes of memory.", positive);
  schema.add("bandwidth", c.device.bandwidth, "Bytes per second of that memory.", positive);
  schema.section("links", "Links");
  schema.add("host_bandwidth", c.links.host_bandwidth, "Bus bandwidth inside a host.", positive);
  schema.add("host_latency", c.links.host_latency, "Seconds of an empty collective.", not_negative);
  schema.add("network_bandwidth", c.links.network_bandwidth, "Bytes per second of a host.",
             positive);
  schema.add("network_latency", c.links.network_latency, "Seconds of a step of a ring of hosts.",
             not_negative);
  schema.add("sharing", c.links.sharing, "Exponent of the share of a group.", fraction);
  schema.add("device_link", c.links.device_link, "Bytes per second from device to host.", positive);
  schema.add("reduce_factor", c.links.reduce_factor, "Speed of all-reduces.", positive);
  schema.add("gather_factor", c.links.gather_factor, "Speed of gathers and scatters.", positive);
  schema.section("efficiency", "Efficiency");
  schema.add("product", c.efficiency.product, "Part of the peak of a large product.", part);
  schema.add("product_half", c.efficiency.product_half, "FLOP that reach half of it.",
             not_negative);
  schema.add("attention", c.efficiency.attention, "Part of the peak of attention.", part);
  schema.add("memory", c.efficiency.memory, "Part of the bandwidth of memory.", part);
  schema.add("launch", c.efficiency.launch, "Seconds to launch a block's forward.", not_negative);
  schema.add("step", c.efficiency.step, "Seconds of every step.", not_negative);
  schema.add("score", c.efficiency.score, "Seconds of an attention score in forward.",
             not_negative);
  schema.add("launch_adds", c.efficiency.launch_adds, "Launching is not under the computation.");
  schema.add("alone", c.efficiency.alone, "Time of a block that one rank computes alone.", part);
  schema.add("alone_head", c.efficiency.alone_head, "The same of the head.", part);
  plan::Software& s = c.software;
  schema.section("software", "Training program");
  schema.add("gradient_bytes", s.gradient_bytes, "Bytes of a reduced gradient.", not_negative);
  schema.add("accumulate_bytes", s.accumulate_bytes, "Bytes moved per micro-batch.", not_negative);
  schema.add("optimizer_bytes", s.optimizer_bytes, "Bytes moved per update.", not_negative);
  schema.add("logit_bytes", s.logit_bytes, "Bytes moved per logit.", not_negative);
  schema.add("stream_bytes", s.stream_bytes, "Bytes moved per element of the stream.",
             not_negative);
  schema.add("score_bytes", s.score_bytes, "Bytes moved per score.", not_negative);
  schema.add("overlap", s.overlap, "Part of the backward that hides reductions.", fraction);
  schema.add("overlap_scatter", s.overlap_scatter, "Also reduce-scatters.");
  schema.add("reduce_each", s.reduce_each, "Sharded gradients are reduced per micro-batch.");
  schema.add("slowdown", s.slowdown, "Slowdown by hidden communication.", not_negative);
  schema.add("waiting", s.waiting, "Computation lost per doubling of tp.", not_negative);
  schema.add("regather", s.regather, "Sequence parallelism gathers again.");
  schema.add("scatter_messages", s.scatter_messages, "Stages send parts.");
  schema.add("pipeline_launch", s.pipeline_launch, "Seconds per block and tp rank.", not_negative);
  return schema;
}

Collective parse_collective(const std::string& name, const std::string& where) {
  for (const auto op :
       {Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter}) {
    if (name == plan::name_of(op)) return op;
  }
  throw ConfigError(format(
      "{}'{}' is no collective: must be all_reduce, all_gather or reduce_scatter", where, name));
}

double positive_number(const std::string& text, const std::string& where) {
  const auto number = parse_number(text);
  require(number && *number > 0, format("{}'{}' must be a number above 0", where, text));
  return *number;
}

std::vector<std::string> split_at(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::vector<MeasuredCollective> read_csv(const std::string& text, const std::string& path) {
  std::vector<MeasuredCollective> rows;
  int number = 0;
  for (const std::string& line : split_at(text, '\n')) {
    if (++number == 1 || line.empty()) continue;
    const std::string where = format("{}:{}: ", path, number);
    const auto cells = split_at(line, ',');
    require(cells.size() == 5,
            format("{}{} columns, must be op,hosts,ranks,bytes,seconds", where, cells.size()));
    rows.push_back({parse_collective(cells[0], where),
                    {static_cast<int>(positive_number(cells[2], where)),
                     static_cast<int>(positive_number(cells[1], where))},
                    positive_number(cells[3], where),
                    positive_number(cells[4], where)});
  }
  return rows;
}

// "#  Rank  3 Group  0 Pid 71 on node1 device  3 ..." for each rank, then lines of
// "size count type redop root time algbw busbw wrong ..."; times are microseconds out of place.
std::vector<MeasuredCollective> read_nccl_tests(const std::string& text, const std::string& path) {
  std::string name;
  for (const char* each : {"all_reduce", "all_gather", "reduce_scatter"}) {
    const std::string program = format("{}_perf", each);
    if (text.find(program) != std::string::npos || path.find(each) != std::string::npos)
      name = each;
  }
  require(!name.empty(), format("{}: names none of all_reduce, all_gather and reduce_scatter, "
                                "neither in the text nor in the path",
                                path));
  const Collective op = parse_collective(name, path);
  std::set<std::string> hosts;
  int ranks = 0;
  std::vector<MeasuredCollective> rows;
  for (const std::string& line : split_at(text, '\n')) {
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) continue;
    if (words[0] == "#") {
      const auto on = std::ranges::find(words, "on");
      if (words.size() > 2 && words[1] == "Rank" && on + 1 < words.end())
        ++ranks, hosts.insert(*(on + 1));
      continue;
    }
    const auto bytes = parse_number(words[0]);
    if (!bytes || *bytes <= 0 || words.size() < 8) continue;
    rows.push_back({op,
                    {ranks, std::max<int>(1, static_cast<int>(hosts.size()))},
                    *bytes,
                    1e-6 * positive_number(words[5], path + ": ")});
  }
  require(ranks > 1 && !rows.empty(),
          format("{}: has {} ranks and {} sizes, must have at least 2 ranks and a size", path,
                 ranks, rows.size()));
  return rows;
}

}  // namespace

std::vector<MeasuredCollective> read_collectives(const std::string& path) {
  const std::string text = read_text(path, kMostBytes);
  auto rows = text.starts_with("op,") ? read_csv(text, path) : read_nccl_tests(text, path);
  std::ranges::stable_sort(rows, {}, &MeasuredCollective::bytes);
  return rows;
}

ClusterFile read_cluster(const std::string& path) {
  const std::string text = read_text(path, kMostBytes);
  ClusterFile file;
  Texts texts;
  // First for the base alone: its values are the defaults of the second reading.
  {
    Schema schema = cluster_schema(file, texts);
    schema.read_text(text, path);
    const Origins origins = schema.origins();
    for (const char* key : kRequired) {
      require(!texts.base.empty() || origins.at(key) != Origin::by_default,
              format("{}: {} is missing, must be a number above 0; or name a description to start "
                     "from with cluster.base",
                     path, key));
    }
  }
  if (!texts.base.empty()) {
    file = {.cluster = plan::typical_cluster(texts.base)};
    Schema schema = cluster_schema(file, texts);
    schema.read_text(text, path);
  }
  for (const std::string& name : split_at(texts.collectives, ',')) {
    const auto folder = std::filesystem::path(path).parent_path();
    const auto rows = read_collectives((folder / name).string());
    file.cluster.links.measured.insert(file.cluster.links.measured.end(), rows.begin(), rows.end());
  }
  return file;
}

std::string to_toml(const ClusterFile& file, const std::string& collectives) {
  ClusterFile copy = file;
  Texts texts{.collectives = collectives};
  const Schema schema = cluster_schema(copy, texts);
  std::string text;
  for (const Section& section : schema.sections()) {
    std::string lines;
    for (const Option& option : section.options) {
      const Value value = option.get();
      if (const auto* string = std::get_if<std::string>(&value); string && string->empty())
        continue;
      lines +=
          format("{} = {}\n", option.name.substr(section.name.size() + 1), toml_literal(value));
    }
    if (!lines.empty()) text += format("{}[{}]\n{}", text.empty() ? "" : "\n", section.name, lines);
  }
  return text;
}

ClusterFile find_cluster(const std::string& name_or_path) {
  if (name_or_path.find_first_of("./") == std::string::npos)
    return {.cluster = plan::typical_cluster(name_or_path)};
  return read_cluster(name_or_path);
}

std::string this_host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string this_build() {
  return format("lockstep {} libtorch {}{}", LOCKSTEP_VERSION, LOCKSTEP_LIBTORCH_MAJOR,
                LOCKSTEP_LIBTORCH_CUDA ? " with CUDA" : "");
}

std::string machine_file() {
  if (const char* path = std::getenv("LOCKSTEP_MACHINE"); path != nullptr && *path != '\0')
    return path;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::string folder = cache != nullptr && *cache != '\0' ? cache
                             : home != nullptr                  ? format("{}/.cache", home)
                                                                : "/tmp";
  return format("{}/lockstep/machine-{}.toml", folder, this_host());
}

void require_this_machine(const ClusterFile& file, const std::string& path) {
  require(
      file.host == this_host() && file.build == this_build(),
      format("{} was measured on host {} by {}, but this is host {} with {}: run lockstep bench "
             "machine, or name a description with --cluster",
             path, file.host, file.build, this_host(), this_build()));
}

ClusterFile cluster_for(const std::string& name) {
  if (!name.empty()) return find_cluster(name);
  const std::string path = machine_file();
  if (!std::filesystem::exists(path)) return find_cluster("h100");
  ClusterFile file = read_cluster(path);
  require_this_machine(file, path);
  return file;
}

}  // namespace lockstep::config
