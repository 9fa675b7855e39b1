// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/language_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/comm/tensor.h"
#include "lockstep/config/model/hf_model.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/hf_directory.h"

namespace lockstep::model {

nn::InitializeRule hugging_face_values(const config::ModelSpec& spec, const std::string& folder) {
  const auto directory = std::make_shared<formats::HfDirectory>(folder);
  return [directory, folder, parts = config::hf_parts(spec)](const at::Tensor& parameter,
                                                             const nn::init::Source& source) {
    const at::NoGradGuard no_grad;
    for (const config::HfPart& part : parts) {
      if (part.ours != source.name) continue;
      const std::string prefixed = "transformer." + part.theirs;
      const std::string& name = directory->contains(prefixed) ? prefixed : part.theirs;
      const formats::HfTensor found = directory->find(name);
      const auto dtype = formats::dtype_of(found.dtype);
      if (!dtype || !is_floating(*dtype)) {
        throw CheckpointError(
            format("{}: {} has dtype {}, must be a floating one", folder, name, found.dtype));
      }
      // Only ever read; torch has no tensors of constant memory.
      at::Tensor values = at::from_blob(const_cast<std::byte*>(found.bytes.data()), found.shape,
                                        comm::detail::to_scalar_type(*dtype));
      if (part.transposed && values.dim() == 2) values = values.t();
      const layout::Shape whole = source.slice ? source.slice->shape : parameter.sizes().vec();
      layout::Shape shape = whole;
      shape[0] = part.rows.size();
      if (values.sizes() != at::IntArrayRef(shape)) {
        throw CheckpointError(format("{}: {} is ({}), must be ({}) for {}", folder, name,
                                     join(values.sizes()), join(shape), part.ours));
      }
      // Of these rows, those that the parameter holds.
      layout::Box held = source.slice ? source.slice->box : layout::Box::whole(whole);
      const layout::Range rows = held.ranges[0].intersect(part.rows);
      if (rows.empty()) continue;
      const at::Tensor target = parameter.narrow(0, rows.begin - held.ranges[0].begin, rows.size());
      held.ranges[0] = {rows.begin - part.rows.begin, rows.end - part.rows.begin};
      for (int64_t dim = 0; dim < values.dim(); ++dim) {
        const layout::Range range = held.ranges[static_cast<size_t>(dim)];
        values = values.narrow(dim, range.begin, range.size());
      }
      target.copy_(values);
    }
    return true;
  };
}

void load_hugging_face(LanguageModelImpl& model, const std::string& folder) {
  const nn::InitializeRule fill = hugging_face_values(model.spec(), folder);
  for (const auto& item : model.named_parameters()) fill(item.value(), {.name = item.key()});
}

}  // namespace lockstep::model
