// What can be said of a call without its sizes: tensors, dtypes, options.
#include "call/check.h"

#include <c10/core/ScalarType.h>

#include <cmath>
#include <iomanip>

#include "call/dtypes.h"

namespace qkv {
namespace {

constexpr const char* kDtypes = "float32, float64, bfloat16 or float16";

void check_dtype(const Call& call, Argument argument) {
  const at::ScalarType query = call[arg::query].scalar_type(), found = call[argument].scalar_type();
  const bool is_wide = found == at::kFloat || found == query;
  const auto expect = [&](bool fits, const auto&... words) {
    expect_dtype(fits, call, argument, words...);
  };
  switch (kArguments[argument].type) {
    case Type::query:
      if (argument == arg::query)
        return expect(dtype_of(found).has_value(), ", but ", kDtypes, " is expected");
      // ops/kvcache checks what has to go with int8.
      if (argument < arg::kDifferentiable && call.op->takes(arg::key_scale) &&
          (found == at::kChar || call[arg::key].scalar_type() == at::kChar))
        return;
      if (found == query) return;  // before a name is looked for
      return expect(false, ", but ", call.name_of(arg::query), " is ", name(query));
    case Type::mask:
      return expect(found == at::kBool || is_wide, ", but bool, float32 or query's dtype (",
                    name(query), ") is expected");
    case Type::addend:
      return expect(is_wide, ", but float32 or query's dtype (", name(query), ") is expected");
    case Type::floating:
      return expect(at::isFloatingType(found), ", but a floating dtype is expected");
    case Type::compute:
      return expect(found == compute_type(query), ", but ", name(compute_type(query)),
                    " is expected, in which query of ", name(query), " is computed");
    case Type::float32:
      return expect(found == at::kFloat, ", but float32 is expected");
    case Type::int32:
      return expect(found == at::kInt, ", but int32 is expected");
    case Type::index:
      return expect(found == at::kInt || found == at::kLong, ", but int32 or int64 is expected");
    default:
      return;
  }
}

// Not of results, their gradients and tangents, which check(call) looks at.
void check_dtypes(const Call& call) {
  for (int i = 0; i < arg::output; ++i)
    if (call.op->takes(Argument(i)) && call.has(Argument(i))) check_dtype(call, Argument(i));
}

void check_options(const Call& call) {
  const char* op = call.title();
  const Options& options = call.options;
  const at::ScalarType query = call[arg::query].scalar_type();
  const double p = options.dropout_p;
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": dropout_p is ", std::setprecision(16), p,
                    ", but a probability between 0 and 1 is expected");
  TORCH_CHECK_VALUE(!options.scale || is_finite_for(query, *options.scale), op, ": ",
                    call.name_of(opt::scale), " is ", options.scale.value_or(0), ", but ",
                    finite_for(query), " is expected");
  // Its reciprocal too: scores are divided by it.
  const double cap = options.softcap;
  TORCH_CHECK_VALUE(
      cap == 0 || (cap > 0 && is_finite_for(query, cap) && is_finite_for(query, 1 / cap)), op,
      ": softcap is ", cap, ", but ", finite_for(query), " above 0, or 0 for none, is expected");
  const Window& window = options.window_size;
  for (const c10::SymInt* size : {&window.left, &window.right}) {
    const std::optional<int64_t> n = size->maybe_as_int();  // CPU kernels see all of them
    TORCH_CHECK_VALUE(!n || *n >= -1, op, ": window_size is (", window.left, ", ", window.right,
                      "), but numbers >= 0, or -1 for an open side, are expected");
  }
}

void check_seed(const Call& call) {
  if (!(call.options.dropout_p > 0)) return;
  const at::Tensor& seed = call[arg::dropout_seed];
  TORCH_CHECK(seed.defined(), call.title(), ": dropout_seed is None, but dropout_p is ",
              call.options.dropout_p, "; expected what qkv::dropout_seed returns");
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.dim() == 1, call.title(),
              ": dropout_seed is ", name(seed.scalar_type()), " with ", seed.dim(),
              " dimensions, but int64 of one dimension is expected");
}

void check_packed(const Call& call) {
  for (const Argument argument : {arg::cu_seq_q, arg::cu_seq_k, arg::seqused_k}) {
    const at::Tensor& tensor = call[argument];
    if (!tensor.defined()) continue;
    const char* name_of = call.name_of(argument);
    TORCH_CHECK(call.is_packed(), call.title(), ": ", name_of,
                " is given, but cu_seq_q is None; expected both or neither");
    TORCH_CHECK(tensor.dim() == 1, call.title(), ": ", name_of, " has ", tensor.dim(),
                " dimensions, but 1 is expected");
  }
}

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

}  // namespace

bool is_finite_for(at::ScalarType query, double x) {
  return std::isfinite(query == at::kDouble ? x : double(float(x)));
}
const char* finite_for(at::ScalarType query) {
  return query == at::kDouble ? "a finite number" : "a finite number of float32's range";
}

std::string_view name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

void check_tensors(const Call& call) {
  TORCH_CHECK(call.has(arg::query), call.title(), ": ", call.name_of(arg::query),
              " is an undefined tensor");
  for (const Parameter& p : call.op->parameters) {
    if (!p.is_tensor) continue;
    const at::Tensor& tensor = call[Argument(p.which)];
    if (p.is_required || tensor.defined())
      check_tensor(call.title(), p.name.c_str(), tensor, call[arg::query]);
  }
}

void check_supported(const Call& call) {
  const at::Device device = call[arg::query].device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta(), call.title(), ": query is on ",
                              device, ", but it is computed on the CPU only");
  check_dtypes(call);
  check_options(call);
  check_seed(call);
  check_packed(call);
}

}  // namespace qkv
