"""What the help of a command says at length, its examples and what it reads; and with which status it ends."""

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

EXAMPLES = """\
examples:
  weince train --help
  weince diagnose pairs.npz --out report
  weince reproduce --list
  weince completion bash > ~/.local/share/bash-completion/completions/weince    (tab completion)
"""
COMPLETION_EXAMPLES = """\
examples:
  weince completion bash > ~/.local/share/bash-completion/completions/weince
  weince completion zsh > ~/.zfunc/_weince             (a folder of $fpath)
  weince completion tcsh > ~/.weince.csh               (and source it)
"""

DIAGNOSE = """\
Tell whether softmax is the right link for paired embeddings, and write a page to look at.

input: .npz or .safetensors with z_i and z_j of shape (pairs, dim), positives row by row (and, if you like, ids:
       pairs with equal ids never compete), or with z (rows, dim) and labels (rows,); .npy of shape
       (2, pairs, dim), or two .npy files of shape (pairs, dim), one after the other; or a folder of such files;
       or the folder of a run of `weince train`, whose held-out images are embedded (--trend: at every snapshot).
       Several inputs are several models, drawn side by side.
"""
DIAGNOSE_EXAMPLES = """\
examples:
  weince diagnose pairs.npz --temperature 0.5
  weince diagnose infonce.npz weince.npz --out report --quick
  weince diagnose seed_1.npz seed_2.npz seed_3.npz --seeds
  weince diagnose checkpoints/ --trend --out run
  weince diagnose my-model/ --sentences pairs.tsv      (needs weince[text])
  weince diagnose runs/cifar100 --trend                (a run of `weince train`, with its snapshots)
"""
TRAIN_EXAMPLES = """\
examples:
  weince train                                          digits with a tiny encoder, on a laptop
  weince train --config cifar100_resnet18 --loss.preset infonce --loss.temperature 0.2 --seed 21 --out runs/a
  weince train --data photos/ --epochs 50 --out runs/b  a folder of images; no labels are needed
  weince train --config my.yaml --devices 4             a setting here wins over the file's
  weince train --config simcse_paper --text wiki.txt --sts sts.tsv    (needs weince[text])
The same command again goes on from the last checkpoint.
"""
EVALUATE_EXAMPLES = """\
examples:
  weince evaluate runs/a
  weince evaluate runs/a runs/b --device cuda
  weince evaluate runs/a --quick
  weince evaluate runs/simcse_paper/best --sts sts.tsv
"""
REPRODUCE_EXAMPLES = """\
examples:
  weince reproduce --list
  weince reproduce linear --dry-run
  weince reproduce digits                                        on a laptop, in minutes
  weince reproduce linear --only cifar100_resnet18 --data cifar100=cifar100.npz --jobs 2
  weince reproduce temperatures --seeds 7 21 --slurm --slurm-options partition=gpu gpus_per_node=1
The same command again goes on with what is missing.
"""
