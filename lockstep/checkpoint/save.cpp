// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/write_slices.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/memory/tensor_bytes.h"
#include "lockstep/optim/gradient_passes.h"

namespace lockstep::checkpoint {
namespace detail {
namespace {

// Of this rank's files; their part of the manifest.
formats::Manifest write_files(const std::string& folder, const SaveRequest& request,
                              const Bytes& bytes, int rank) {
  std::vector<formats::ShardSlice> all;
  for (const NamedSlice& slice : request.slices) {
    all.push_back({.name = slice.placement.name,
                   .dtype = formats::safetensors_name(memory::dtype_of(slice.tensor, "checkpoint")),
                   .shape = slice.placement.global_shape,
                   .box = slice.placement.slice});
  }
  formats::Manifest manifest{.step = request.step};
  const auto parts = formats::shard_parts(all);
  for (size_t part = 0; part < parts.size(); ++part) {
    const std::string file = formats::shard_file_name(rank + 1, static_cast<int>(part) + 1,
                                                      static_cast<int>(parts.size()));
    std::vector<formats::ShardSlice> slices;
    std::map<std::string, size_t> by_name;
    for (const size_t index : parts[part]) {
      slices.push_back(all[index]);
      by_name[all[index].name] = index;
    }
    auto writer = formats::open_shard(folder, file, slices);
    for (const formats::SafetensorsEntry& entry : writer.entries()) {
      bytes(by_name.at(entry.name),
            [&](std::span<const std::byte> piece) { writer.write(entry.name, piece); });
    }
    manifest.merge(formats::shard_manifest(request.step, file, writer.finish(), slices));
  }
  return manifest;
}

// The link is changed before what it linked to is removed. Older ones that stay for want of a
// permission do no harm.
void prune(const std::string& dir, const SaveRequest& request) {
  try {
    if (request.best) formats::link_best(dir, *request.best);
  } catch (const std::exception& failure) {
    log::warn(format("{}/best does not link to step {}: {}", dir, *request.best, failure.what()));
    return;  // the best one would be removed
  }
  if (request.keep == 0) return;
  try {
    const auto complete = formats::list_complete(dir);
    if (complete.empty()) {
      log::warn(format("{} no longer has the checkpoint of step {}: it was moved or removed", dir,
                       request.step));
      return;
    }
    // Where another run left newer ones, this one would count as old, and go.
    const int64_t newest = complete.back().step;
    if (newest <= request.step) {
      formats::prune(dir, request.keep);
    } else {
      log::warn(format("{} has a checkpoint of step {}, newer than {}: none is removed", dir,
                       newest, request.step));
    }
  } catch (const std::exception& failure) {
    log::warn(format("older checkpoints in {} could not be removed: {}", dir, failure.what()));
  }
}

// After a failure, when all ranks have come to an end: a full disk gets its space back.
void abandon(const io::FolderLock& lock, int64_t step) {
  const std::string& dir = lock.dir();
  try {
    lock.require_held();  // else what is there may be another job's
    formats::abandon_checkpoint(dir, step);
  } catch (const std::exception& failure) {
    log::warn(
        format("an incomplete checkpoint could not be removed from {}: {}", dir, failure.what()));
  }
}

std::string fill(const std::string& folder, const io::FolderLock* lock, const std::string& dir,
                 const SaveRequest& request, const Bytes& bytes, const comm::Group& group) {
  const bool leads = group.rank() == 0;
  const auto parts = comm::run_on_all_ranks("save", group, [&]() -> std::string {
    if (request.slices.empty()) return "";
    return write_files(folder, request, bytes, group.rank()).to_json();
  });
  const auto paths = comm::run_on_all_ranks("save", group, [&]() -> std::string {
    if (!leads) return "";
    formats::Manifest manifest{
        .step = request.step, .state = request.state, .config = request.config};
    for (const std::string& part : parts) {
      if (!part.empty()) manifest.merge(formats::Manifest::part_from_json(part, folder));
    }
    return formats::commit_checkpoint(dir, manifest, lock);
  });
  // The others wait: deleting may take long.
  comm::run_on_all_ranks("save", group, [&]() -> std::string {
    if (leads) prune(dir, request);
    return "";
  });
  return paths[0];
}

}  // namespace

void give_bytes(const at::Tensor& tensor, const Sink& sink) {
  const at::NoGradGuard no_grad;
  optim::announce_read(tensor);
  sink(memory::bytes_of(tensor.cpu().contiguous()));
}

void take_lock(Lock& lock, const std::string& dir) {
  if (lock) return lock->renew();
  lock = std::make_unique<io::FolderLock>(dir);
}

std::string write(Lock& lock, const std::string& dir, const SaveRequest& request,
                  const Bytes& bytes, const comm::Group& group) {
  const std::string folder = comm::run_on_all_ranks("save", group, [&]() -> std::string {
    if (group.rank() != 0) return "";
    take_lock(lock, dir);
    return formats::begin_checkpoint(dir, request.step);
  })[0];
  try {
    return fill(folder, lock.get(), dir, request, bytes, group);
  } catch (const CommError&) {
    throw;  // others may still be writing; the next save of this step will clear it away
  } catch (const std::exception&) {
    comm::run_on_all_ranks("save", group, [&]() -> std::string {
      if (group.rank() == 0) abandon(*lock, request.step);
      return "";
    });
    throw;
  }
}

}  // namespace detail

std::string save(const std::string& dir, const SaveRequest& request, const comm::Group& group) {
  const SaveRequest mine = detail::share_of(request, group);
  detail::Lock lock;  // for this save
  return detail::write(
      lock, dir, mine,
      [&](size_t slice, const detail::Sink& sink) {
        detail::give_bytes(mine.slices[slice].tensor, sink);
      },
      group);
}

std::optional<std::string> newest(const std::string& dir, const comm::Group& group) {
  const auto paths = comm::run_on_all_ranks("newest", group, [&]() -> std::string {
    if (group.rank() != 0) return "";
    const auto found = formats::newest_complete(dir);
    return found ? found->path : "";
  });
  return paths[0].empty() ? std::nullopt : std::optional(paths[0]);
}

}  // namespace lockstep::checkpoint
