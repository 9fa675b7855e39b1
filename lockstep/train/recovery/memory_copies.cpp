// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/recovery/memory_copies.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/work.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/core/trace.h"
#include "lockstep/core/version.h"
#include "lockstep/io/json.h"
#include "lockstep/launch/recovery_memory.h"
#include "lockstep/memory/tensor_bytes.h"
#include "lockstep/train/recovery/fill_slices.h"

namespace lockstep::train {
namespace {

// Calls with each contiguous part of a tensor on the CPU, in row-major order. No operator runs:
// another thread than the one that trains may call this.
template <class Function>
void for_each_run(const at::Tensor& tensor, const Function& function) {
  const auto width = static_cast<int64_t>(tensor.element_size());
  int64_t run = width;
  int64_t dim = tensor.dim();
  while (dim > 0 && (tensor.size(dim - 1) == 1 || tensor.stride(dim - 1) * width == run)) {
    run *= tensor.size(--dim);
  }
  const auto* const base = static_cast<const std::byte*>(tensor.data_ptr());
  std::vector<int64_t> index(static_cast<size_t>(dim));
  while (true) {
    int64_t offset = 0;
    for (int64_t i = 0; i < dim; ++i) offset += index[static_cast<size_t>(i)] * tensor.stride(i);
    function(std::span(base + offset * width, static_cast<size_t>(run)));
    int64_t last = dim - 1;
    while (last >= 0 && ++index[static_cast<size_t>(last)] == tensor.size(last))
      index[static_cast<size_t>(last--)] = 0;
    if (last < 0) return;
  }
}

CopiedSlice described(const checkpoint::NamedSlice& slice, int rank) {
  const layout::Placement& placement = slice.placement;
  const at::Tensor& tensor = slice.tensor;
  CopiedSlice copied{.name = placement.name,
                     .shape = placement.global_shape,
                     .box = placement.slice,
                     .dtype = memory::dtype_of(tensor, placement.name),
                     .rank = slice.of_first_rank ? rank : -1};
  check(static_cast<int64_t>(copied.bytes()) == static_cast<int64_t>(tensor.nbytes()),
        "a slice has the bytes of its placement");
  return copied;
}

nlohmann::json copy_json(const CopyId& copy) { return {copy.generation, copy.step}; }

CopyId copy_id_from(const nlohmann::json& json) { return {json[0], json[1]}; }

}  // namespace

CopyMemory CopyMemory::of_launcher() {
  const RankEnv env = RankEnv::detect();
  const char* const descriptor = std::getenv(launch::kRecoveryVariable);
  if (descriptor == nullptr || !env.local_rank || !env.local_size)
    throw ConfigError(
        "run.recovery is memory, but no launcher keeps copies of this rank's state: use "
        "lockstep train -n N --run.max_restarts K, or lockstep run --max-restarts K; a limit of "
        "file sizes (ulimit -f) forbids it too");
  return {std::atoi(descriptor), *env.local_rank, *env.local_size, env.restart_count};
}

MemoryCopies::MemoryCopies(const comm::Group& world, const CopyMemory& memory, std::string identity,
                           std::function<Slices()> slices, Options options)
    : world_(world),
      memory_(memory),
      identity_(format("{}\n{}", LOCKSTEP_VERSION, identity)),
      slices_(std::move(slices)),
      at_once_(options.at_once) {
  Slices all = slices_();
  share(all, options.verifies);
  // They hold for all later steps. What is staged would keep its memory.
  if (!at_once_) kept_ = std::move(all);
}

MemoryCopies::~MemoryCopies() {
  if (running_.valid()) running_.wait();
}

// Every rank computes the same from the same lists.
void MemoryCopies::share(const Slices& slices, bool verifies) {
  for (const checkpoint::NamedSlice& slice : slices)
    held_.push_back(described(slice, world_.rank()));
  std::vector<CopiedSlice> listed = held_;
  std::erase_if(listed, [](const CopiedSlice& slice) { return slice.bytes() == 0; });
  std::vector<std::vector<CopiedSlice>> lists;
  std::vector<int> nodes;
  for (const std::string& text :
       comm::gather_texts(std::to_string(node()) + "\n" + to_text(listed), world_)) {
    const size_t end = text.find('\n');
    nodes.push_back(std::stoi(text.substr(0, end)));
    lists.push_back(slices_from(text.substr(end + 1)));
  }
  // Single numbers, such as counters of steps, are the same on all ranks of every layout: what is
  // known of them says nothing about the rest.
  std::set<std::string> keys;
  for (const auto& list : lists) {
    for (const CopiedSlice& slice : list) {
      if (verifies && !slice.shape.empty() && !keys.insert(slice.key()).second) copies_ = 3;
    }
  }
  const auto shares = share_copies(lists, nodes);
  const CopyShare& mine = shares[static_cast<size_t>(world_.rank())];
  const auto stretch_of = [](int region, int from, const std::vector<CopiedSlice>& copied) {
    return Stretch{.region = region,
                   .area = from < 0 ? 0 : CopyRegion::kGuestArea,
                   .from = from,
                   .text = to_text(copied),
                   .data_bytes = copy_bytes(copied)};
  };
  stretches_.push_back(stretch_of(memory_.local_rank, -1, mine.own));
  const auto bytes_of = [&](const std::vector<CopiedSlice>& copied) {
    return CopyRegion::bytes_for(copy_bytes(copied), identity_.size() + to_text(copied).size(),
                                 copies_);
  };
  bool any = false;
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    const auto& [own, sent, to] = shares[rank];
    if (nodes[rank] == node()) node_bytes_ += bytes_of(own);
    if (to < 0) continue;
    any = true;
    if (nodes[static_cast<size_t>(to)] == node()) node_bytes_ += bytes_of(sent);
    const int from = static_cast<int>(rank);
    if (to == world_.rank()) stretches_.push_back(stretch_of(from - nodes[rank], from, sent));
  }
  if (any) exchange_ = std::make_unique<CopyExchange>(world_.split(0, world_.rank()), mine);
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < held_.size(); ++i) places.emplace(held_[i].key(), i);
  for (const CopiedSlice& slice : mine.own) mine_.push_back(places.at(slice.key()));
}

// Also at the regions of ranks that are not started again.
std::vector<FoundCopies> MemoryCopies::look() {
  const auto texts = comm::run_on_all_ranks("recovery", world_, [&] {
    nlohmann::json list = nlohmann::json::array();
    struct stat status {};
    if (fstat(memory_.descriptor, &status) != 0) throw SystemError("copies in memory", errno);
    const auto regions = static_cast<int>(status.st_size / launch::kRecoveryStride);
    for (const Stretch& stretch : stretches_) {
      if (stretch.region < regions) continue;
      throw ConfigError(
          format("run.recovery memory: the launcher of rank {} keeps copies of {}, but is to keep "
                 "that of local rank {} of another node: start all nodes with the same -n",
                 world_.rank(), counted(regions, "rank"), stretch.region));
    }
    for (int region = memory_.local_rank; region < regions; region += memory_.local_size) {
      for (int area = 0; area < CopyRegion::kAreas; ++area) {
        auto opened =
            std::make_unique<CopyRegion>(memory_.descriptor, region, area, memory_.generation);
        CopyRegion::Found found = opened->find(identity_);
        if (!found.refused.empty())
          refused_ = format(" (rank {}: {})", world_.rank(), found.refused);
        nlohmann::json copies = nlohmann::json::array();
        for (const CopyId& copy : found.copies) copies.push_back(copy_json(copy));
        if (!copies.empty()) list.push_back({region, area, copies, found.slices});
        looked_at_.push_back({region, area, std::move(opened), std::move(found)});
      }
    }
    return nlohmann::json{node(), list, refused_}.dump();
  });
  std::vector<FoundCopies> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto json = io::parse_json(texts[rank], "list of copies");
    for (const auto& entry : json[1]) {
      FoundCopies found{.place = {json[0], static_cast<int>(rank), entry[0], entry[1]}};
      for (const auto& copy : entry[2]) found.copies.push_back(copy_id_from(copy));
      found.slices = slices_from(entry[3].get<std::string>());
      all.push_back(std::move(found));
    }
    if (refused_.empty()) refused_ = json[2].get<std::string>();
  }
  return all;
}

// That all ranks can continue from. Of two starts the later one's: it has seen the copies of the
// earlier one.
std::optional<CopyId> MemoryCopies::newest(const std::vector<FoundCopies>& found,
                                           const CopyIndex& index) const {
  const auto texts = comm::run_on_all_ranks("recovery", world_, [&] {
    std::set<CopyId> candidates;
    for (const FoundCopies& each : found) candidates.insert(each.copies.begin(), each.copies.end());
    nlohmann::json mine = nlohmann::json::array();
    for (const CopyId& copy : candidates) {
      const bool all = std::ranges::all_of(held_, [&](const CopiedSlice& slice) {
        return slice.bytes() == 0 || index.sources_of(slice, copy);
      });
      if (all) mine.push_back(copy_json(copy));
    }
    return mine.dump();
  });
  std::optional<std::set<CopyId>> common;
  for (const std::string& text : texts) {
    std::set<CopyId> theirs;
    for (const auto& json : io::parse_json(text, "list of copies")) {
      const CopyId copy = copy_id_from(json);
      if (!common || common->contains(copy)) theirs.insert(copy);
    }
    common = std::move(theirs);
  }
  if (!common || common->empty()) return std::nullopt;
  return *common->rbegin();
}

// Before any rank writes again: a copy that is newer on some ranks is of a step that is repeated.
// Copies that another layout has made stay in their areas until all ranks have made new ones.
void MemoryCopies::make_room(const std::optional<CopyId>& chosen) {
  // Its text says that the region has what it will have.
  const auto stays = [&](const Looked& each) {
    for (Stretch& stretch : stretches_) {
      const bool is_guest = each.area >= CopyRegion::kGuestArea;
      if (stretch.region != each.region || (stretch.from >= 0) != is_guest) continue;
      const bool same = each.found.slices == stretch.text && each.found.room == copies_;
      stretch.area = same ? each.area : each.area ^ 1;  // the other one of two
      return same;
    }
    return false;
  };
  const auto moved = comm::run_on_all_ranks("recovery", world_, [&]() -> std::string {
    for (Looked& each : looked_at_) {
      const auto& copies = each.found.copies;
      if (!chosen || std::ranges::find(copies, *chosen) == copies.end()) {
        each.opened->clear();
        continue;
      }
      each.opened->keep(*chosen);
      if (stays(each)) continue;
      each.opened->free_all_but(*chosen);
      old_.push_back(std::move(each.opened));
    }
    looked_at_.clear();
    return old_.empty() ? "" : "moved";
  });
  moved_ = std::ranges::any_of(moved, [](const std::string& text) { return !text.empty(); });
  comm::run_on_all_ranks("recovery", world_, [&]() -> std::string {
    if (memory_.local_rank == 0) require_room();
    return "";
  });
  comm::run_on_all_ranks("recovery", world_, [&]() -> std::string {
    for (Stretch& stretch : stretches_) {
      stretch.opened = std::make_unique<CopyRegion>(memory_.descriptor, stretch.region,
                                                    stretch.area, memory_.generation);
      stretch.opened->claim(identity_, stretch.text, stretch.data_bytes, copies_,
                            moved_ ? 1 : copies_);
    }
    return "";
  });
}

// When all ranks have a copy of their own.
void MemoryCopies::drop_old() {
  comm::barrier(world_, {.tag = "copies"}).wait();
  for (const auto& region : old_) region->clear();
  old_.clear();
  comm::barrier(world_, {.tag = "copies"}).wait();
  for (const Stretch& stretch : stretches_) stretch.opened->claim_rest();
  moved_ = false;
}

void MemoryCopies::require_room() const {
  struct stat status {};
  const uint64_t held =
      fstat(memory_.descriptor, &status) == 0 ? static_cast<uint64_t>(status.st_blocks) * 512 : 0;
  // Of another layout there is one copy, and until all ranks have made their own, one of theirs.
  const uint64_t now = node_bytes_ / static_cast<uint64_t>(copies_);
  require_room_for_copies(moved_ ? std::max(held + now, node_bytes_) : node_bytes_, held,
                          available_memory());
}

std::optional<MemoryCopies::Restored> MemoryCopies::restore() {
  const at::NoGradGuard no_grad;
  const std::vector<FoundCopies> found = look();
  const CopyIndex index(found, node());
  const auto chosen = newest(found, index);
  make_room(chosen);
  if (!chosen) {
    if (memory_.generation > 0 && world_.rank() == 0) {
      log::warn(
          format("run.recovery: the ranks have no copy of one step in memory{}; the newest "
                 "checkpoint is used, or the run starts again",
                 refused_));
    }
    return std::nullopt;
  }
  const Slices slices = at_once_ ? slices_() : kept_;
  // Shards become writable on all ranks, and what was gathered from them becomes invalid.
  std::set<const void*> opened;
  for (const checkpoint::NamedSlice& slice : slices) {
    if (slice.model && opened.insert(slice.model->shared().get()).second)
      parallel::ShardedModel(*slice.model).begin_update();
  }
  for (const checkpoint::NamedSlice& slice : slices) {
    if (slice.saving) slice.saving();
  }
  SourcesOfSlices sources;
  for (const CopiedSlice& slice : held_) {
    sources.push_back(slice.bytes() == 0 ? std::vector<CopySource>()
                                         : index.sources_of(slice, *chosen).value());
  }
  std::map<std::pair<int, int>, CopyRegion> regions;
  const auto region_at = [&](const CopyPlace& place) -> const CopyRegion& {
    return regions
        .try_emplace({place.region, place.area}, memory_.descriptor, place.region, place.area,
                     memory_.generation)
        .first->second;
  };
  fill_slices(
      slices, sources, [&](const CopyPlace& place) { return region_at(place).data(*chosen); },
      node(), world_);
  for (const checkpoint::NamedSlice& slice : slices) {
    if (slice.loaded) slice.loaded();
  }
  // All copies of a step have the same text.
  const auto first = std::ranges::find_if(found, [&](const FoundCopies& each) {
    return std::ranges::find(each.copies, *chosen) != each.copies.end();
  });
  const auto texts = comm::run_on_all_ranks("recovery", world_, [&]() -> std::string {
    return first->place.keeper == world_.rank() ? region_at(first->place).state(*chosen) : "";
  });
  Restored restored{.step = chosen->step};
  const std::string origin = "state of a copy";
  const auto json = io::parse_json(texts[static_cast<size_t>(first->place.keeper)], origin);
  for (const auto& [name, value] : json.items()) restored.state[name] = value.get<std::string>();
  return restored;
}

void MemoryCopies::begin(int64_t step, const std::map<std::string, std::string>& state) {
  wait();
  if (moved_ && begun_++ > 0) drop_old();
  const Slices fresh = at_once_ ? slices_() : Slices();
  const Slices& slices = at_once_ ? fresh : kept_;
  check(slices.size() == held_.size(), "the slices are those that the copies were made for");
  Slices mine;
  for (const checkpoint::NamedSlice& slice : slices) {
    if (slice.saving) slice.saving();
  }
  bool on_device = false;
  for (const size_t index : mine_) {
    mine.push_back(slices[index]);
    on_device = on_device || !slices[index].tensor.device().is_cpu();
  }
  const std::string text = nlohmann::json(state).dump();
  if (at_once_) return write(step, text, mine);
  if (!on_device) {
    running_ = std::async(std::launch::async,
                          [this, step, text, mine = std::move(mine)] { write(step, text, mine); });
    return;
  }
  // On a stream of its own, after what is queued now.
  const auto first = std::find_if(
      mine.begin(), mine.end(), [](const auto& slice) { return !slice.tensor.device().is_cpu(); });
  const c10::Device device = first->tensor.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  event.block(stream);
  running_ = std::async(std::launch::async, [this, step, text, stream, mine = std::move(mine)] {
    const c10::StreamGuard on_stream(stream);
    write(step, text, mine);
  });
}

// Once for each of the copies. Where CUDA refuses, data take the way through memory of its own.
void MemoryCopies::pin(std::span<std::byte> pages) {
  auto& pinned = pinned_[pages.data()];
  if (pinned) return;
  pinned = std::make_unique<memory::PinnedPages>(pages);
  if (!pinned->refusal().empty())
    log::debug(format("run.recovery: memory of copies is not pinned: {}", pinned->refusal()));
}

void MemoryCopies::write(int64_t step, const std::string& state, const Slices& mine) {
  const at::NoGradGuard no_grad;
  const trace::Span span("recovery", "copy");
  std::optional<comm::ExcludeBlockedTime> exclude;
  if (!at_once_) exclude.emplace();  // training waits in wait()
  for (const Stretch& stretch : stretches_) stretch.opened->begin();
  CopyRegion& own = *stretches_.front().opened;
  std::optional<c10::Device> device;  // that data come from
  for (const checkpoint::NamedSlice& slice : mine) {
    own.align();
    const at::Tensor& tensor = slice.tensor;
    if (tensor.device().is_cpu() && !at_once_) {
      for_each_run(tensor, [&](std::span<const std::byte> run) { own.append(run); });
      continue;
    }
    // Operators restore what is not in memory.
    if (tensor.device().is_cpu()) {
      const at::Tensor copy = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
      copy.copy_(tensor);
      own.append(memory::bytes_of(copy));
      continue;
    }
    if (tensor.is_cuda()) pin(own.pages());
    device = tensor.device();
    const at::Tensor arrives = at::from_blob(own.room(tensor.nbytes()).data(), tensor.sizes(),
                                             at::TensorOptions(tensor.scalar_type()));
    arrives.copy_(tensor.detach().contiguous(), /*non_blocking=*/true);
  }
  own.align();
  if (device) {
    const c10::impl::VirtualGuardImpl guard(device->type());
    guard.synchronizeStream(guard.getStream(*device));
  }
  own.commit(step, state);
  if (!exchange_) return;
  std::vector<CopyExchange::Incoming> incoming;
  for (const Stretch& stretch : stretches_) {
    if (stretch.from >= 0)
      incoming.push_back({stretch.from, stretch.data_bytes, stretch.opened.get()});
  }
  exchange_->run(own.data({memory_.generation, step}), incoming);
  for (const auto& each : incoming) each.region->commit(step, state);
}

void MemoryCopies::wait() {
  if (running_.valid()) running_.get();
}

void MemoryCopies::verified() {
  wait();
  for (const Stretch& stretch : stretches_) stretch.opened->verify_newest();
}

void MemoryCopies::distrust() {
  wait();
  for (const Stretch& stretch : stretches_) stretch.opened->keep_verified();
  for (const auto& region : old_) region->keep_verified();
}

void MemoryCopies::forget() {
  wait();
  for (const Stretch& stretch : stretches_) stretch.opened->drop_all();
  for (const auto& region : old_) region->clear();
}

}  // namespace lockstep::train
