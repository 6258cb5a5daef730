import time, sys, jax, jax.numpy as jnp, brainstate, numpy as np
import braintrace as bt
N,B,T,I=[int(a) for a in (sys.argv[1:5] if len(sys.argv)>4 else (256,16,128,64))]
modes=sys.argv[5].split(',') if len(sys.argv)>5 else ['bptt','block','drop','step']
class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell=bt.nn.GRUCell(I,N)
        self.out=bt.nn.Linear(N,10)
    def update(self,x): return self.out(self.cell(x))
net=Net()
rng=np.random.default_rng(0)
xs=jnp.asarray(rng.normal(size=(T,B,I)),jnp.float32); ys=jnp.asarray(rng.normal(size=(T,B,10)),jnp.float32)
brainstate.nn.init_all_states(net,batch_size=B)
params=net.states(brainstate.ParamState)
fs={}
def bptt():
    def loss(xs,ys):
        def st(x,y): return jnp.mean((net(x)-y)**2)
        return brainstate.transform.for_loop(st,xs,ys).sum()
    def f(xs,ys):
        net.cell.h.value=jnp.zeros((B,N))
        return brainstate.transform.grad(loss,params)(xs,ys)
    return brainstate.transform.jit(f)
def ours(alg='d_rtrl',chunk=None,opts={},**kw):
    l=bt.compile(net,alg,xs[0],batch_size=B,**opts)
    def st(x,y): return jnp.mean((l(x)-y)**2)
    def stw(x,y): return jnp.mean((l(bt.MultiStepData(x))-y)**2,axis=(1,2))
    def f(xs,ys):
        net.cell.h.value=jnp.zeros((B,N)); l.reset_state()
        return l.etrace_grad(xs,ys,step_fn=stw if chunk else st,reduction='sum',chunk_size=chunk,**kw)
    return brainstate.transform.jit(f)
make=dict(bptt=bptt, block=lambda:ours(), drop=lambda:ours(keep_traces=False), step=lambda:ours(block_size=1),
  pp=lambda:ours('pp_prop',opts=dict(decay_or_rank=.9)), ppstep=lambda:ours('pp_prop',opts=dict(decay_or_rank=.9),block_size=1), win=lambda:ours(chunk=16,opts=dict(vjp_method='multi-step')),
  windrop=lambda:ours(chunk=16,opts=dict(vjp_method='multi-step'),keep_traces=False))

if len(sys.argv)>6:
    import glob
res={};g={}
for m in modes:
    t=time.perf_counter(); fs[m]=make[m](); g[m]=jax.block_until_ready(fs[m](xs,ys)); res[m]=[]; print(m,'compile+first',round(time.perf_counter()-t,2),flush=True)
for r in range(7):
    for m in modes:
        t=time.perf_counter(); jax.block_until_ready(fs[m](xs,ys)); res[m].append(time.perf_counter()-t)
for m in modes: print(m, 'median ms', round(1e3*float(np.median(res[m])),2), 'min', round(1e3*min(res[m]),2))
flat=lambda t: jnp.concatenate([jnp.ravel(a) for a in jax.tree.leaves(t)])
for m in modes: 
    if 'step' in modes: print(m,'err to step', float(jnp.linalg.norm(flat(g[m])-flat(g['step']))/jnp.linalg.norm(flat(g['step']))))
