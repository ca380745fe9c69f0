// The stand-in's memory and kernels: device memory is host memory that an allocator counts, and a
// kernel is the CPU's on aliases of it. Tensors of both devices in one call are an error, as on CUDA.
// Every kernel, copy, allocation and host wait is told to `observe(kind, name, accesses)` in Python.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <set>

namespace {

using at::Tensor;
using Access = std::tuple<int64_t, int64_t, int64_t, bool>;  // storage, first byte, end, is it written
using Accesses = std::vector<Access>;
using Sizes = c10::SymIntArrayRef;

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == DEVICE; }

// Observation ------------------------------------------------------------------------------------

py::object* observer = nullptr;
thread_local bool is_observing = false;

void observe(const char* kind, const std::string& name, const Accesses& accesses) {
  if (!observer || is_observing || !Py_IsInitialized()) return;
  is_observing = true;
  {
    py::gil_scoped_acquire gil;
    py::error_scope pending;  // kernels run while Python handles an error, too
    try {
      (*observer)(kind, name, accesses);
    } catch (py::error_already_set& error) {
      fprintf(stderr, "stand-in device: %s\n", error.what());
    }
  }
  is_observing = false;
}

void add_access(const Tensor& t, bool is_written, Accesses& accesses) {
  if (!is_ours(t) || !t.numel() || !t.storage().data()) return;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const int64_t begin = t.storage_offset() * t.element_size();
  const auto storage = reinterpret_cast<int64_t>(t.storage().data());
  accesses.emplace_back(storage, begin, begin + (last + 1) * t.element_size(), is_written);
}

// Memory -----------------------------------------------------------------------------------------

std::atomic<int64_t> allocated_bytes{0}, peak_bytes{0};

struct Block {
  c10::DataPtr host;
  size_t nbytes;
};

Accesses whole(const Block& block) {
  return {{reinterpret_cast<int64_t>(block.host.get()), 0, static_cast<int64_t>(block.nbytes), true}};
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  allocated_bytes -= block->nbytes;
  if (block->nbytes) observe("free", "", whole(*block));
}

c10::DataPtr adopt(c10::DataPtr host, size_t nbytes) {
  void* data = host.get();
  auto* block = new Block{std::move(host), nbytes};
  const int64_t now = allocated_bytes += nbytes;
  for (int64_t peak = peak_bytes; now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
  }
  if (nbytes) observe("allocate", "", whole(*block));
  return {data, block, &free_block, c10::Device(DEVICE, 0)};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return adopt(c10::GetAllocator(c10::kCPU)->allocate(nbytes), nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

// The same memory seen from the other side -------------------------------------------------------

c10::DataPtr keep(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  return {storage.mutable_data(), owner, [](void* s) { delete static_cast<c10::Storage*>(s); }, c10::kCPU};
}

Tensor tensor_over(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

Tensor as_host(const Tensor& t) {
  if (!is_ours(t)) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), keep(t.storage()),
                       c10::GetAllocator(c10::kCPU), true);
  auto out = tensor_over(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t);
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

c10::Storage as_device_storage(const Tensor& host) {
  const size_t nbytes = host.storage().nbytes();
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, adopt(keep(host.storage()), nbytes), &allocator, true);
}

// Kernels ----------------------------------------------------------------------------------------

const std::set<std::string> TAKES_BOTH{
    "aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"};
const std::set<std::string> HOST_WAITS{
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave.Tensor"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(c10::toString(op.operator_name())) {}

  void run() {
    to_host();
    TORCH_CHECK(!(has_ours_ && has_host_) || TAKES_BOTH.count(name_), name_,
                ": Expected all tensors to be on the same device, but found standin and cpu");
    if (HOST_WAITS.count(name_)) observe("wait", name_, {});
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    follow_resized();
    to_device();
    if (!accesses_.empty()) observe("kernel", name_, accesses_);
  }

 private:
  struct Pair {
    Tensor ours, host;
    bool is_written;
  };

  Tensor host_of(const Tensor& t, bool is_written) {
    if (!t.defined()) return t;
    if (!is_ours(t)) {
      has_host_ |= t.device().is_cpu() && t.dim() > 0;
      return t;
    }
    has_ours_ = true;
    add_access(t, is_written, accesses_);
    for (auto& pair : pairs_) {
      if (pair.ours.is_same(t)) {
        pair.is_written |= is_written;
        return pair.host;
      }
    }
    pairs_.push_back({t, as_host(t), is_written});
    return pairs_.back().host;
  }

  void to_host() {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack_)[begin + i];
      const auto* alias = arguments[i].alias_info();
      const bool is_written = alias && alias->isWrite();
      if (value.isTensor()) {
        value = host_of(value.toTensor(), is_written);
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& t : list) t = host_of(t, is_written);
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
          list.push_back(t.has_value() ? std::optional<Tensor>(host_of(*t, is_written)) : t);
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == DEVICE) {
        value = c10::Device(c10::kCPU);
        has_ours_ = true;
      }
    }
  }

  void follow_resized() {
    for (auto& [ours, host, is_written] : pairs_) {
      const bool has_moved = host.storage().data() != ours.storage().data();
      if (!is_written || (ours.sizes().equals(host.sizes()) && !has_moved)) continue;
      auto* impl = ours.unsafeGetTensorImpl();
      if (has_moved) impl->set_storage_keep_dtype(as_device_storage(host));
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  Tensor ours_of(const Tensor& host) {
    if (!host.defined() || !has_ours_ || is_ours(host)) return host;
    for (auto& pair : pairs_)
      if (pair.host.is_same(host)) return pair.ours;
    for (auto& pair : pairs_)
      if (pair.host.storage().data() && pair.host.storage().data() == host.storage().data())
        return tensor_over(pair.ours.storage(), KEYS, host);
    auto out = tensor_over(as_device_storage(host), KEYS, host);
    add_access(out, true, accesses_);
    return out;
  }

  void to_device() {
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = ours_of(value.toTensor());
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& t : list) t = ours_of(t);
        value = list;
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::string name_;
  std::vector<Pair> pairs_;
  Accesses accesses_;
  bool has_ours_ = false, has_host_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           KEYS, c10::dtype_or_default(dtype));
}
Tensor view_like(const Tensor& self, const Tensor& host) { return tensor_over(self.storage(), KEYS, host); }
Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto out = view_like(self, self);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? offset->expect_int() : self.storage_offset());
  return out;
}
Tensor view(const Tensor& self, Sizes size) { return view_like(self, as_host(self).view(C10_AS_INTARRAYREF_SLOW(size))); }
Tensor view_dtype(const Tensor& self, at::ScalarType dtype) { return view_like(self, as_host(self).view(dtype)); }
Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) { return as_strided(self, size, stride, std::nullopt); }
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_like(self, as_host(self).unfold(dim, size, step));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Accesses accesses;
  add_access(self, false, accesses);
  add_access(to, true, accesses);
  if (is_ours(self) != is_ours(to) && !non_blocking)
    observe("wait", is_ours(self) ? "copy device to host" : "copy pageable host to device", {});
  as_host(to).copy_(as_host(self));
  observe("kernel", "aten::_copy_from", accesses);
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar item(const Tensor& self) {
  observe("wait", "item", {});
  Accesses accesses;
  add_access(self, false, accesses);
  observe("kernel", "item", accesses);
  return as_host(self).item();
}
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  // The CPU has none of whole numbers, with which models count the tokens of experts on a device
  auto host = at::histc(as_host(self).to(at::kFloat), bins, min, max).to(self.scalar_type());
  auto out = tensor_over(as_device_storage(host), KEYS, host);
  Accesses accesses;
  add_access(self, false, accesses);
  add_access(out, true, accesses);
  observe("kernel", "aten::histc", accesses);
  return out;
}
const Tensor& resize_(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  auto host = at::empty(C10_AS_INTARRAYREF_SLOW(size), self.options().device(c10::kCPU));
  auto* impl = self.unsafeGetTensorImpl();
  const size_t held = self.storage().nbytes();
  if (host.storage().nbytes() > held) {
    auto storage = as_device_storage(host);
    if (held) memcpy(storage.mutable_data(), self.storage().data(), held);
    impl->set_storage_keep_dtype(std::move(storage));
  }
  impl->set_sizes_and_strides(host.sizes(), host.strides());
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(c10::IntArrayRef{numel}, c10::IntArrayRef{1}, 0);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("histc", histc);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  // One kernel for all tensors of a list, as on CUDA where they lie alike; others go one by one.
  for (const char* name : {"_foreach_add_.List", "_foreach_copy_", "_foreach_norm.Scalar", "_foreach_zero_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("as_host", &as_host);
  m.def("as_device", [](const Tensor& host) { return tensor_over(as_device_storage(host), KEYS, host); });
  m.def("allocated_bytes", [] { return allocated_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = allocated_bytes.load(); });
  m.def("set_observer", [](py::object function) {
    delete observer;
    observer = function.is_none() ? nullptr : new py::object(function);
  });
}
