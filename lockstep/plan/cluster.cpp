// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/cluster.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::plan {
namespace {

// Bytes that the busiest link carries for each byte of the buffer.
double bus_factor(Collective op, int ranks) {
  const double parts = (ranks - 1.0) / ranks;
  return op == Collective::all_reduce ? 2 * parts : parts;
}

// Bus bandwidth of measured times of one group: between two sizes by interpolation of the times,
// outside them that of the nearest. Points are sorted by size.
double seconds_at(const std::vector<const MeasuredCollective*>& points, double bytes) {
  const auto above = std::ranges::lower_bound(points, bytes, {}, &MeasuredCollective::bytes);
  if (above == points.begin()) {
    // A single point stands for its bandwidth; of several, the first is the floor.
    const MeasuredCollective& first = *points.front();
    return points.size() > 1 ? first.seconds : first.seconds * bytes / first.bytes;
  }
  if (above == points.end()) return points.back()->seconds * bytes / points.back()->bytes;
  const MeasuredCollective& low = **(above - 1);
  const MeasuredCollective& high = **above;
  const double part = (bytes - low.bytes) / (high.bytes - low.bytes);
  return low.seconds + part * (high.seconds - low.seconds);
}

// The measured group that is most like this one: of as many hosts or the next larger number, then
// of as many ranks or the nearest number.
std::vector<const MeasuredCollective*> like(const Links& links, Collective op, GroupShape group) {
  const auto badness = [&](const MeasuredCollective& each) {
    const double hosts = std::log2(static_cast<double>(each.group.hosts) / group.hosts);
    const double ranks = std::log2(static_cast<double>(each.group.ranks) / group.ranks);
    return 100 * (hosts < 0 ? -4 * hosts : hosts) + std::abs(ranks);
  };
  std::vector<const MeasuredCollective*> points;
  double best = 0;
  for (const MeasuredCollective& each : links.measured) {
    if (each.op != op || (each.group.hosts > 1) != (group.hosts > 1)) continue;
    const double bad = badness(each);
    if (!points.empty() && bad > best) continue;
    if (points.empty() || bad < best) points.clear();
    best = bad;
    points.push_back(&each);
  }
  return points;
}

}  // namespace

std::string_view name_of(Collective op) {
  switch (op) {
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
  }
  return "";
}

Cluster typical_cluster(std::string_view name) {
  Cluster cluster{.note = "typical, not measured"};
  if (name == "a100") {
    cluster.name = "A100 node";
    cluster.device = {"A100 80 GB", 312e12, 80e9, 2.039e12};
    cluster.links.host_bandwidth = 230e9;
    cluster.links.network_bandwidth = 200e9 * 0.6;
    cluster.efficiency = {.product = 0.77, .attention = 0.32, .memory = 0.7, .launch = 1e-3};
    return cluster;
  }
  if (name == "h100" || name == "h200") {
    const bool h200 = name == "h200";
    cluster.name = h200 ? "H200 node" : "H100 node";
    cluster.device = {h200 ? "H200 141 GB" : "H100 80 GB", 989e12, h200 ? 141e9 : 80e9,
                      h200 ? 4.8e12 : 3.35e12};
    cluster.links.host_bandwidth = 370e9;
    cluster.links.network_bandwidth = 400e9 * 0.5;
    cluster.efficiency = {.product = 0.65, .attention = 0.22, .memory = 0.6, .launch = 1e-3};
    return cluster;
  }
  throw ConfigError(
      format("there is no cluster called '{}': use a100, h100, h200 or a file", name));
}

double collective_time(const Cluster& cluster, Collective op, GroupShape group, double bytes) {
  if (group.ranks <= 1 || bytes <= 0) return 0;
  const Links& links = cluster.links;
  const double factor = op == Collective::all_reduce ? links.reduce_factor : links.gather_factor;
  const double bus = bus_factor(op, group.ranks);
  const double per_host = static_cast<double>(group.ranks) / group.hosts;
  const double share =
      std::pow(std::clamp(per_host / cluster.devices_per_node, 0.0, 1.0), links.sharing);
  const double steps = (op == Collective::all_reduce ? 2 : 1) * (group.ranks - 1.0);
  const double latency = links.host_latency + (group.hosts > 1 ? steps * links.network_latency : 0);
  const auto points = like(links, op, group);
  if (points.empty()) {
    const double bandwidth = group.hosts == 1
                                 ? links.host_bandwidth
                                 : std::min(links.network_bandwidth * share, links.host_bandwidth);
    return latency + bytes * bus / (bandwidth * factor);
  }
  const GroupShape measured = points.front()->group;
  const double others = seconds_at(points, bytes) / factor;
  // One size says a bandwidth and nothing of the latency.
  const double floor = points.size() > 1 ? 0 : latency;
  if (measured == group) return others + floor;
  const double same_bus = others * bus / bus_factor(op, measured.ranks);
  if (group.hosts == 1) return same_bus + floor;
  return std::max(same_bus / share, bytes * bus / links.host_bandwidth) + floor;
}

double message_time(const Cluster& cluster, bool same_host, double bytes) {
  const Links& links = cluster.links;
  if (same_host) return links.host_latency + bytes / links.host_bandwidth;
  return links.network_latency +
         bytes / std::min(links.host_bandwidth, links.network_bandwidth / cluster.devices_per_node);
}

}  // namespace lockstep::plan
