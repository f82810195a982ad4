// What can be said of a call without its sizes: tensors, dtypes, options.
#include "check.h"

#include <c10/core/ScalarType.h>

#include <cmath>

namespace qkv {
namespace {

constexpr const char* kDtypes = "float32, float64, bfloat16 or float16";

void check_dtypes(const Forward& call) {
  const at::ScalarType dtype = call.query().scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      call.op, ": query is ", name(dtype), ", but ", kDtypes, " is expected");
  for (const Argument argument : {kKey, kValue}) {
    if (!call[argument].defined()) continue;
    TORCH_CHECK(call[argument].scalar_type() == dtype, call.op, ": ", call.name_of(argument),
                " is ", name(call[argument].scalar_type()), ", but query is ", name(dtype));
  }
  if (call.attn_mask().defined()) {
    const at::ScalarType mask = call.attn_mask().scalar_type();
    TORCH_CHECK(mask == at::kBool || mask == at::kFloat || mask == dtype, call.op,
                ": attn_mask is ", name(mask), ", but bool, float32 or query's dtype (",
                name(dtype), ") is expected");
  }
  for (const Argument argument : {kAlibiSlopes, kSinks}) {
    if (!call[argument].defined()) continue;
    TORCH_CHECK(at::isFloatingType(call[argument].scalar_type()), call.op, ": ",
                call.name_of(argument), " is ", name(call[argument].scalar_type()),
                ", but a floating dtype is expected");
  }
}

void check_options(const char* op, const Options& options, at::ScalarType query) {
  const double p = options.dropout_p;
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": dropout_p is ", p,
                    ", but a probability between 0 and 1 is expected");
  TORCH_CHECK_VALUE(!options.scale || is_finite_for(query, *options.scale), op, ": scale is ",
                    options.scale.value_or(0), ", but ", finite_for(query), " is expected");
  // Its reciprocal too: scores are divided by it.
  const double cap = options.softcap;
  TORCH_CHECK_VALUE(
      cap == 0 || (cap > 0 && is_finite_for(query, cap) && is_finite_for(query, 1 / cap)), op,
      ": softcap is ", cap, ", but ", finite_for(query), " above 0, or 0 for none, is expected");
  for (const c10::SymInt& size : options.window_size) {
    const std::optional<int64_t> n = size.maybe_as_int();  // CPU kernels see all of them
    TORCH_CHECK_VALUE(!n || *n >= -1, op, ": window_size is (", options.window_size[0], ", ",
                      options.window_size[1],
                      "), but numbers >= 0, or -1 for an open side, are expected");
  }
}

void check_seed(const Forward& call) {
  if (!(call.options.dropout_p > 0)) return;
  const at::Tensor& seed = call[kDropoutSeed];
  TORCH_CHECK(seed.defined(), call.op, ": dropout_seed is None, but dropout_p is ",
              call.options.dropout_p, "; expected what qkv::dropout_seed returns");
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.dim() == 1, call.op, ": dropout_seed is ",
              name(seed.scalar_type()), " with ", seed.dim(),
              " dimensions, but int64 [1] is expected");
}

void check_packed(const Forward& call) {
  for (const Argument argument : {kCuSeqQ, kCuSeqK, kSequsedK}) {
    const at::Tensor& tensor = call[argument];
    if (!tensor.defined()) continue;
    const char* name_of = call.name_of(argument);
    TORCH_CHECK(call.is_packed(), call.op, ": ", name_of,
                " is given, but cu_seq_q is None; expected both or neither");
    check_index(call.op, name_of, tensor);
    TORCH_CHECK(tensor.dim() == 1, call.op, ": ", name_of, " has ", tensor.dim(),
                " dimensions, but 1 is expected");
  }
  TORCH_CHECK(!call.is_packed() || !call.attn_mask().defined(), call.op,
              ": attn_mask is given, but packed documents (cu_seq_q) take None");
}

// The tensors that a backward operator has besides those of `call`; undefined: None.
void check_more(const Forward& call,
                std::initializer_list<std::pair<const char*, const at::Tensor*>> more) {
  check_tensors(call);
  for (const auto& [argument, tensor] : more)
    if (tensor->defined()) check_tensor(call.op, argument, *tensor, call.query());
}

}  // namespace

void check_tensor(const char* op, const char* argument, const at::Tensor& tensor,
                  const at::Tensor& query) {
  TORCH_CHECK(tensor.defined(), op, ": ", argument, " is an undefined tensor");
  TORCH_CHECK(!tensor.is_nested(), op, ": ", argument,
              " is a nested tensor, but dense tensors are expected; pad it and mask the padding");
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", argument, " has the layout ",
              tensor.layout(), ", but a dense (strided) tensor is expected");
  TORCH_CHECK(!tensor.is_quantized(), op, ": ", argument, " is quantized, but ", kDtypes,
              " is expected; dequantize() it");
  TORCH_CHECK(tensor.device() == query.device(), op, ": ", argument, " is on ", tensor.device(),
              ", but query is on ", query.device());
}

void check_index(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ",
              argument, " is ", name(tensor.scalar_type()), ", but int32 or int64 is expected");
}

bool is_finite_for(at::ScalarType query, double x) {
  return std::isfinite(query == at::kDouble ? x : double(float(x)));
}
const char* finite_for(at::ScalarType query) {
  return query == at::kDouble ? "a finite number" : "a finite number of float32's range";
}

std::string_view name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

void check_tensors(const Forward& call) {
  for (int i = 0; i < kArguments; ++i) {
    const at::Tensor& tensor = *call.tensors[i];
    const bool required = i <= kKey || (i == kValue && call.has_value);
    if (required || tensor.defined()) check_tensor(call.op, call.name_of(i), tensor, call.query());
  }
}

void check_tensors(const Backward& c) {
  check_more(c.forward, {{"output", &c.output},
                         {"logsumexp", &c.lse},
                         {"grad_output", &c.grad_output},
                         {"grad_logsumexp", &c.grad_lse}});
}

void check_tensors(const WeightsBackward& c) {
  check_more(c.weights.forward, {{"grad_weights", &c.grad_weights}, {"logsumexp", &c.lse}});
}

void check_tensors(const HardBackward& c) {
  check_more(c.hard.forward, {{"grad_output", &c.grad_output}, {"index", &c.index}});
}

void check_supported(const Forward& call) {
  const at::Device device = call.query().device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta(), call.op, ": query is on ",
                              device, ", but it is computed on the CPU only");
  check_dtypes(call);
  check_options(call.op, call.options, call.query().scalar_type());
  check_seed(call);
  check_packed(call);
}

}  // namespace qkv
