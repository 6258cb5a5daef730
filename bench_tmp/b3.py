import time, sys, jax, jax.numpy as jnp, brainstate, numpy as np
import braintrace as bt
N,B,T,I=[int(a) for a in sys.argv[1:5]]
class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__(); self.cell=bt.nn.GRUCell(I,N); self.out=bt.nn.Linear(N,10)
    def update(self,x): return self.out(self.cell(x))
net=Net(); rng=np.random.default_rng(0)
xs=jnp.asarray(rng.normal(size=(T,B,I)),jnp.float32); ys=jnp.asarray(rng.normal(size=(T,B,10)),jnp.float32)
l=bt.compile(net,'d_rtrl',xs[0],batch_size=B)
def st(x,y): return jnp.mean((l(x)-y)**2)
def timed(name,f,*a):
    t=time.perf_counter(); o=jax.block_until_ready(f(*a)); c=time.perf_counter()-t
    ts=[]
    for _ in range(7):
        t=time.perf_counter(); jax.block_until_ready(f(*a)); ts.append(time.perf_counter()-t)
    print(f'{name:30s} {1e3*np.median(ts):8.2f} ms  first {c:.1f}',flush=True); return o
jit=brainstate.transform.jit
def reset(): net.cell.h.value=jnp.zeros((B,N)); l.reset_state()
timed('nothing', jit(lambda xs,ys: xs[0]), xs,ys)
timed('reset only', jit(lambda xs,ys: (reset(), xs[0])[1]), xs,ys)
timed('jit grad keep, no reset', jit(lambda xs,ys: l.etrace_grad(xs,ys,step_fn=st)), xs,ys)
timed('jit grad drop, no reset', jit(lambda xs,ys: l.etrace_grad(xs,ys,step_fn=st,keep_traces=False)), xs,ys)
timed('jit reset grad drop', jit(lambda xs,ys: (reset(), l.etrace_grad(xs,ys,step_fn=st,keep_traces=False))[1]), xs,ys)
timed('jit reset grad keep', jit(lambda xs,ys: (reset(), l.etrace_grad(xs,ys,step_fn=st))[1]), xs,ys)
timed('eager grad keep', lambda xs,ys: l.etrace_grad(xs,ys,step_fn=st), xs,ys)
timed('eager grad drop', lambda xs,ys: l.etrace_grad(xs,ys,step_fn=st,keep_traces=False), xs,ys)
p=bt.compile(net,'pp_prop',xs[0],batch_size=B,decay_or_rank=.9)
def sp(x,y): return jnp.mean((p(x)-y)**2)
timed('jit pp', jit(lambda xs,ys: p.etrace_grad(xs,ys,step_fn=sp)), xs,ys)
if len(sys.argv)>5:
    f=jit(lambda xs,ys: (reset(), l.etrace_grad(xs,ys,step_fn=st))[1]); f(xs,ys)
    import os
    with jax.profiler.trace(sys.argv[5]):
        jax.block_until_ready(f(xs,ys)); jax.block_until_ready(f(xs,ys))
