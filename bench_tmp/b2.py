import time, sys, jax, jax.numpy as jnp, brainstate, numpy as np
import braintrace as bt
from braintrace.engine import _learn, Span, Values, stretch
from braintrace.engine import _recurrence
N,B,T,I=[int(a) for a in sys.argv[1:5]]
class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__(); self.cell=bt.nn.GRUCell(I,N)
    def update(self,x): return self.cell(x)
net=Net(); rng=np.random.default_rng(0)
xs=jnp.asarray(rng.normal(size=(T,B,I)),jnp.float32); 
l=bt.compile(net,'d_rtrl',xs[0],batch_size=B)
info,graph=l.executor.trace(xs[0]); rule=l.rule
consts=info.consts
vals=Values(consts,(xs,),info.leaves('params'),info.leaves('hidden'),info.leaves('others'))
span=Span(T,tuple(False for _ in consts),(True,),None)
tr=[t.value for t in l.etraces.values()]
def timed(name,f,*a):
    f=jax.jit(f); t=time.perf_counter(); o=jax.block_until_ready(f(*a)); c=time.perf_counter()-t
    ts=[]
    for _ in range(10):
        t=time.perf_counter(); jax.block_until_ready(f(*a)); ts.append(time.perf_counter()-t)
    print(f'{name:30s} {1e3*np.median(ts):8.2f} ms  compile {c:.1f}',flush=True); return o
path,ys=timed('path',lambda v: _learn._path(graph,v,span),vals)
steps=timed('observe',lambda p,y: _learn._observed(graph,p,span,y),path,ys)
print([jax.tree.map(lambda a:a.shape,s) for s in steps][:1])
def fwd(v,tr):
    return stretch(graph,rule,v,tr,span,keep=False).outs
timed('stretch forward only',fwd,vals,tr)
def loss(params,v,tr,fresh,keep):
    from dataclasses import replace
    r=stretch(graph,rule,replace(v,params=params),tr,span,keep=keep,fresh=fresh)
    return jnp.mean(r.outs[0]**2), r.traces
g=lambda keep: (lambda v,tr,fresh: jax.grad(loss,has_aux=True)(v.params,v,tr,fresh,keep))
timed('grad drop, fresh',g(False),vals,tr,jnp.ones((),bool))
timed('grad drop, not fresh',g(False),vals,tr,jnp.zeros((),bool))
timed('grad keep, fresh',g(True),vals,tr,jnp.ones((),bool))
gr=lambda v,tr: jax.grad(lambda p: jnp.mean(stretch(graph,rule,__import__('dataclasses').replace(v,params=p),tr,span,keep=False,fresh=None).outs[0]**2))(v.params)
weights=graph.operands(consts,vals.params)
from braintrace.rules import Signals
lam=[jnp.ones_like(s.f) for s in steps]; ct=[jnp.ones((T,*r.operator.y.shape)) for r in graph.relations]
sig=lambda: [Signals(a,c,None,False) for a,c in zip(lam,ct)]
timed('credit (fresh)',lambda tr,steps,lam,ct,fresh: rule.credit(graph.relations,tr,steps,[Signals(a,c,None,False) for a,c in zip(lam,ct)],weights,fresh),tr,steps,lam,ct,jnp.ones((),bool))
timed('credit (not fresh)',lambda tr,steps,lam,ct: rule.credit(graph.relations,tr,steps,[Signals(a,c,None,False) for a,c in zip(lam,ct)],weights,None),tr,steps,lam,ct)
from braintrace.rules import _linear
timed('later',lambda steps,lam,ct: _linear.later(graph.relations,steps,[Signals(a,c,None,False) for a,c in zip(lam,ct)]),steps,lam,ct)
timed('advance',lambda tr,steps: rule.advance(graph.relations,tr,steps,weights),tr,steps)
from braintrace.rules._stretch import pull,grown
r=graph.relations[0]
timed('pull one',lambda x,c: pull(r,x,c,weights[0]),steps[0].x,ct[0])
x2=xs.reshape(T*B,I)
h=jnp.ones((B,N)); W=jnp.ones((N,3*N))
timed('bare scan matmul',lambda h,W: jax.lax.scan(lambda h,_: (jnp.tanh((h@W)[:,:N]),None),h,None,T)[0],h,W)
W1=jnp.ones((N+I,N)); 
timed('bare scan 3 matmul concat',lambda h,W: jax.lax.scan(lambda h,x: (jnp.tanh(jnp.concatenate([x,h],-1)@W1)+jnp.tanh(jnp.concatenate([x,2*h],-1)@W1)*jnp.tanh(jnp.concatenate([x,3*h],-1)@W1),None),h,xs)[0],h,W)
