// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <set>
#include <sstream>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/cut_slices.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::checkpoint {
namespace {

// Of what cannot be read straight into its place: another type, device or order in memory.
constexpr int64_t kBuffer = int64_t{16} << 20;

// Names, with shapes, of what any rank asks for. Collective: the same on all.
using Wanted = std::set<std::pair<std::string, std::string>>;

Wanted wanted_by_all(const std::vector<NamedSlice>& slices, const comm::Group& group) {
  std::string mine;
  for (const NamedSlice& slice : slices) {
    mine += slice.placement.name + '\n' + layout::describe(slice.placement.global_shape) + '\n';
  }
  Wanted wanted;
  for (const std::string& text : comm::run_on_all_ranks("load", group, [&] { return mine; })) {
    std::istringstream lines(text);
    for (std::string name, shape; std::getline(lines, name) && std::getline(lines, shape);) {
      wanted.emplace(name, shape);
    }
  }
  return wanted;
}

struct Differences {
  std::vector<std::string> missing, misshapen, extra;
  std::set<std::string> unfit = {};
  // Parameters of which some of the optimizer's state, or they themselves, cannot be loaded. Then
  // none of their state is: moments say nothing without their count, nor it without them.
  std::set<std::string> stateless = {};

  bool fits(const std::string& name) const {
    const std::string parameter = detail::parameter_of(name);
    return !unfit.contains(name) && (parameter == name || !stateless.contains(parameter));
  }
  void leave_out(const std::string& name) {
    unfit.insert(name);
    stateless.insert(detail::parameter_of(name));
  }
  bool none() const { return missing.empty() && misshapen.empty() && extra.empty(); }
  // Of each kind at most so many.
  std::string describe(size_t most) const {
    std::vector<std::string> parts;
    const auto add = [&](const char* what, const std::vector<std::string>& names) {
      if (names.empty()) return;
      const size_t shown = std::min(most, names.size());
      parts.push_back(
          format("{}: {}", what, join(std::vector(names.begin(), names.begin() + shown))));
      if (shown < names.size()) parts.back() += format(" and {} more", names.size() - shown);
    };
    add("it lacks", missing);
    add("of another shape", misshapen);
    add("the model has no", extra);
    return join(parts, "; ");
  }
};

Differences compare(const formats::Manifest& manifest, const Wanted& wanted,
                    const LoadOptions& options) {
  Differences found;
  std::set<std::string> names;
  for (const auto& [name, shape] : wanted) {
    names.insert(name);
    const auto record = manifest.tensors.find(name);
    if (record == manifest.tensors.end()) {
      found.missing.push_back(name);
      found.leave_out(name);
    } else if (const auto there = layout::describe(record->second.shape); there != shape) {
      found.misshapen.push_back(format("{} is {} there, {} here", name, there, shape));
      found.leave_out(name);
    }
  }
  for (const auto& [name, record] : manifest.tensors) {
    const auto ignored = [&](const std::string& prefix) { return name.starts_with(prefix); };
    if (!names.contains(name) && std::ranges::none_of(options.may_ignore, ignored)) {
      found.extra.push_back(name);
    }
  }
  return found;
}

// One rank says it, for all find the same.
void report(const Differences& found, const std::string& path, bool partial, bool speaks) {
  if (found.none()) return;
  if (partial) {
    if (speaks)
      log::warn(format("[load] {} is loaded in part: {}", path, found.describe(SIZE_MAX)));
    return;
  }
  constexpr size_t kShown = 1;  // of each kind
  throw CheckpointError(
      format("[load] {} is not a checkpoint of this model: {}", path, found.describe(kShown)));
}

class Filler {
 public:
  explicit Filler(formats::CheckpointReader& reader) : reader_(reader) {}

  void fill(const NamedSlice& slice) {
    const std::string& name = slice.placement.name;
    const layout::Box& held = slice.placement.slice;
    const auto dtype = dtype_of(name);
    if (slice.tensor.device().is_cpu() && slice.tensor.scalar_type() == dtype &&
        slice.tensor.is_contiguous()) {
      // Reading goes past torch. An operator on nothing tells autograd, and a sharded model whose
      // memory this is, or refuses.
      if (!slice.tensor.is_inference()) slice.tensor.as_strided({0}, {1}).zero_();
      reader_.read(name, held, memory::bytes_of(slice.tensor));
      return;
    }
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    for (const layout::Box& piece : layout::pieces(held, kBuffer / width)) {
      flight::show_life();
      const at::Tensor part = detail::part_of(slice.tensor, held, piece);
      if (!buffer_.defined()) buffer_ = at::empty({kBuffer}, at::kByte);
      const at::Tensor values =
          buffer_.narrow(0, 0, piece.numel() * width).view(dtype).view(part.sizes());
      reader_.read(name, piece, memory::bytes_of(values));
      part.copy_(values);
    }
  }

 private:
  at::ScalarType dtype_of(const std::string& name) const {
    const std::string& dtype = reader_.manifest().tensors.at(name).dtype;
    const auto known = formats::dtype_of(dtype);
    if (!known)
      throw CheckpointError(format("[load] {} has dtype {}, which is unknown", name, dtype));
    return memory::to_scalar_type(*known);
  }

  formats::CheckpointReader& reader_;
  at::Tensor buffer_;
};

// What the models hold may be in use: copies of it become invalid, and no rank reads another's
// shards, until the next use after the load.
void open_for_writing(const std::vector<NamedSlice>& slices) {
  std::set<const void*> opened;
  for (const NamedSlice& slice : slices) {
    if (!slice.model || !opened.insert(slice.model->shared().get()).second) continue;
    parallel::ShardedModel(*slice.model).begin_update();
  }
}

}  // namespace

Loaded load(const std::string& path, const std::vector<NamedSlice>& slices,
            const comm::Group& group, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  std::unique_ptr<formats::CheckpointReader> reader;
  const auto wanted = wanted_by_all(slices, group);
  Differences differences;
  comm::run_on_all_ranks("load", group, [&]() -> std::string {
    for (const NamedSlice& slice : slices) detail::check_slice(slice);
    reader = std::make_unique<formats::CheckpointReader>(path, options.verify);
    differences = compare(reader->manifest(), wanted, options);
    report(differences, path, options.partial, group.rank() == 0);
    return "";
  });
  open_for_writing(slices);
  comm::run_on_all_ranks("load", group, [&]() -> std::string {
    // Before any is filled: other parts of the same tensor may stay as they are.
    for (const NamedSlice& slice : slices) {
      if (slice.saving && differences.fits(slice.placement.name)) slice.saving();
    }
    Filler filler(*reader);
    for (const NamedSlice& slice : slices) {
      if (differences.fits(slice.placement.name) && !slice.placement.is_empty()) filler.fill(slice);
    }
    return "";
  });
  for (const NamedSlice& slice : slices) {
    if (slice.loaded && differences.fits(slice.placement.name)) slice.loaded();
  }
  const formats::Manifest& manifest = reader->manifest();
  return {path, manifest.step, manifest.state, manifest.config};
}

}  // namespace lockstep::checkpoint
