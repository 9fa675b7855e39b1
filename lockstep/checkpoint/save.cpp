#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <span>
#include <tuple>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/exchange.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/shard_file.h"

namespace lockstep::checkpoint {
namespace {

std::string dtype_name(const NamedSlice& slice) {
  return formats::safetensors_name(comm::detail::dtype_of(slice.tensor, "checkpoint"));
}

// What tells two slices apart; the same text on every rank that holds the slice.
std::string identity(const NamedSlice& slice) {
  return slice.placement.name + " " + slice.placement.slice.describe();
}

void check_slice(const NamedSlice& slice) {
  slice.placement.validate();
  if (slice.tensor.sizes() == at::IntArrayRef(slice.placement.local_shape())) return;
  throw ConfigError(format("[checkpoint] {} is a tensor of ({}), must be ({})",
                           slice.placement.describe(), join(slice.tensor.sizes()),
                           join(slice.placement.local_shape())));
}

// Which rank writes each slice: the one with the least to write among those that hold it, largest
// slices first. Every rank computes the same from the same lists.
std::map<std::string, size_t> choose_writers(const std::vector<std::string>& lists) {
  struct Candidate {
    int64_t bytes = 0;
    std::vector<size_t> holders = {};
  };
  std::map<std::string, Candidate> candidates;
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    std::string_view list = lists[rank];
    while (!list.empty()) {  // "BYTES IDENTITY\0"
      const std::string entry(list.substr(0, list.find('\0')));
      list.remove_prefix(entry.size() + 1);
      const size_t space = entry.find(' ');
      Candidate& candidate = candidates[entry.substr(space + 1)];
      candidate.bytes = std::stoll(entry.substr(0, space));
      candidate.holders.push_back(rank);
    }
  }
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [name, candidate] : candidates) order.emplace_back(-candidate.bytes, name);
  std::sort(order.begin(), order.end());
  std::vector<int64_t> load(lists.size());
  std::map<std::string, size_t> writers;
  for (const auto& [negative_bytes, name] : order) {
    const auto& holders = candidates[name].holders;
    const size_t writer = *std::min_element(
        holders.begin(), holders.end(),
        [&](size_t a, size_t b) { return std::tie(load[a], a) < std::tie(load[b], b); });
    load[writer] -= negative_bytes;
    writers[name] = writer;
  }
  return writers;
}

// Returns the file's part of the manifest.
std::string write_shard(const std::string& folder, int64_t step, int rank,
                        const std::vector<const NamedSlice*>& slices) {
  const std::string file = formats::shard_file_name(rank + 1);
  std::vector<formats::ShardSlice> entries;
  std::map<std::string, const NamedSlice*> by_key;
  std::map<std::string, int> times;
  for (const NamedSlice* slice : slices) {
    const std::string& name = slice->placement.name;
    const int nth = times[name]++;  // a second slice of a tensor needs a name of its own
    const std::string key = nth == 0 ? name : format("{}#{}", name, nth);
    entries.push_back({.name = name,
                       .dtype = dtype_name(*slice),
                       .shape = slice->placement.global_shape,
                       .box = slice->placement.slice,
                       .key = nth == 0 ? "" : key});
    by_key[key] = slice;
  }
  auto writer = formats::open_shard(folder, file, entries);
  for (const formats::SafetensorsEntry& entry : writer.entries()) {
    const at::Tensor tensor = by_key.at(entry.name)->tensor.cpu().contiguous();
    writer.write(entry.name, {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  }
  return formats::shard_manifest(step, file, writer.finish(), entries).to_json();
}

}  // namespace

std::string save(const std::string& dir, const Contents& contents, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  const auto lists = detail::together("save", group, [&] {
    std::string list;
    for (const NamedSlice& slice : contents.slices) {
      check_slice(slice);
      // Nothing of a tensor that others hold; a tensor without elements is whole, and kept.
      if (slice.placement.is_empty() && !slice.placement.is_whole()) continue;
      list += std::to_string(slice.tensor.nbytes()) + " " + identity(slice) + '\0';
    }
    return list;
  });
  const auto folders = detail::together("save", group, [&]() -> std::string {
    return group.rank() == 0 ? formats::begin_checkpoint(dir, contents.step) : "";
  });
  const std::string& folder = folders[0];

  const auto writers = choose_writers(lists);
  const auto parts = detail::together("save", group, [&]() -> std::string {
    std::vector<const NamedSlice*> mine;
    for (const NamedSlice& slice : contents.slices) {
      const auto found = writers.find(identity(slice));
      if (found != writers.end() && static_cast<int>(found->second) == group.rank()) {
        mine.push_back(&slice);
      }
    }
    return mine.empty() ? "" : write_shard(folder, contents.step, group.rank(), mine);
  });

  const auto paths = detail::together("save", group, [&]() -> std::string {
    if (group.rank() != 0) return "";
    formats::Manifest manifest{
        .step = contents.step, .state = contents.state, .config = contents.config};
    for (const std::string& part : parts) {
      if (!part.empty()) manifest.merge(formats::Manifest::part_from_json(part, folder));
    }
    return formats::commit_checkpoint(dir, manifest);
  });
  return paths[0];
}

}  // namespace lockstep::checkpoint
