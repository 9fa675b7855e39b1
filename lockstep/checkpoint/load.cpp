#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/exchange.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/dtype_names.h"

namespace lockstep::checkpoint {
namespace {

// Of what cannot be read straight into its place: another type, device or order in memory.
constexpr int64_t kBuffer = int64_t{16} << 20;

// Names and shapes of what any rank asks for. Collective: the same on all.
std::map<std::string, std::string> wanted_by_all(const std::vector<NamedSlice>& slices,
                                                 const comm::Group& group) {
  std::string mine;
  for (const NamedSlice& slice : slices) {
    mine += slice.placement.name + '\n' + layout::describe(slice.placement.global_shape) + '\n';
  }
  std::map<std::string, std::string> wanted;
  for (const std::string& text : detail::exchange_texts(mine, group)) {
    std::istringstream lines(text);
    for (std::string name, shape; std::getline(lines, name) && std::getline(lines, shape);) {
      wanted.emplace(name, shape);
    }
  }
  return wanted;
}

struct Differences {
  std::vector<std::string> missing, misshapen, extra;

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

Differences compare(const formats::Manifest& manifest,
                    const std::map<std::string, std::string>& wanted, const LoadOptions& options) {
  Differences found;
  for (const auto& [name, shape] : wanted) {
    const auto record = manifest.tensors.find(name);
    if (record == manifest.tensors.end()) {
      found.missing.push_back(name);
    } else if (const auto there = layout::describe(record->second.shape); there != shape) {
      found.misshapen.push_back(format("{} is {} there, {} here", name, there, shape));
    }
  }
  for (const auto& [name, record] : manifest.tensors) {
    const auto ignored = [&](const std::string& prefix) { return name.starts_with(prefix); };
    if (!wanted.contains(name) && std::ranges::none_of(options.may_ignore, ignored)) {
      found.extra.push_back(name);
    }
  }
  return found;
}

// One rank says it, for all find the same.
void report(const Differences& found, const std::string& path, bool partial, bool speaks) {
  if (found.none()) return;
  constexpr size_t kShown = 5;
  const std::string brief = found.describe(kShown), all = found.describe(SIZE_MAX);
  if (partial) {
    if (speaks) log::warn(format("[load] {} is loaded in part: {}", path, all));
    return;
  }
  if (speaks && brief != all) log::error(format("[load] {}: {}", path, all));
  throw CheckpointError(format("[load] {} is not a checkpoint of this model: {}", path, brief));
}

// A view of the part of `tensor`, which holds `held`, that `box` is.
at::Tensor part_of(at::Tensor tensor, const layout::Box& held, const layout::Box& box) {
  if (tensor.dim() == 0) return tensor;
  for (size_t dim = 0; dim < box.ranges.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim),
                           box.ranges[dim].begin - held.ranges[dim].begin, box.ranges[dim].size());
  }
  return tensor;
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
      reader_.read(name, held, comm::detail::bytes_of(slice.tensor));
      return;
    }
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    for (const layout::Box& piece : layout::pieces(held, kBuffer / width)) {
      const at::Tensor part = part_of(slice.tensor, held, piece);
      if (!buffer_.defined()) buffer_ = at::empty({kBuffer}, at::kByte);
      const at::Tensor values =
          buffer_.narrow(0, 0, piece.numel() * width).view(dtype).view(part.sizes());
      reader_.read(name, piece, comm::detail::bytes_of(values));
      part.copy_(values);
    }
  }

 private:
  at::ScalarType dtype_of(const std::string& name) const {
    const std::string& dtype = reader_.manifest().tensors.at(name).dtype;
    const auto known = formats::dtype_of(dtype);
    if (!known)
      throw CheckpointError(format("[load] {} has dtype {}, which is unknown", name, dtype));
    return comm::detail::to_scalar_type(*known);
  }

  formats::CheckpointReader& reader_;
  at::Tensor buffer_;
};

}  // namespace

formats::Manifest load(const std::string& path, const std::vector<NamedSlice>& slices,
                       const comm::Group& group, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  std::unique_ptr<formats::CheckpointReader> reader;
  const auto wanted = wanted_by_all(slices, group);
  detail::together("load", group, [&]() -> std::string {
    reader = std::make_unique<formats::CheckpointReader>(path, options.verify);
    report(compare(reader->manifest(), wanted, options), path, options.partial, group.rank() == 0);
    return "";
  });
  const auto& tensors = reader->manifest().tensors;
  const auto is_there = [&](const NamedSlice& slice) {
    const auto found = tensors.find(slice.placement.name);
    return found != tensors.end() && found->second.shape == slice.placement.global_shape;
  };
  detail::together("load", group, [&]() -> std::string {
    Filler filler(*reader);
    for (const NamedSlice& slice : slices) {
      if (is_there(slice) && !slice.placement.is_empty()) filler.fill(slice);
    }
    return "";
  });
  for (const NamedSlice& slice : slices) {
    if (slice.loaded && is_there(slice)) slice.loaded();
  }
  return reader->manifest();
}

}  // namespace lockstep::checkpoint
