"""Stories in which a number has to be worked out; setups, endings and questions of a scheme combine freely."""

from toolformer_dag.synthetic.wordings.addition import ADDITION, UNSEEN_ADDITION
from toolformer_dag.synthetic.wordings.division import DIVISION, UNSEEN_DIVISION
from toolformer_dag.synthetic.wordings.multiplication import MULTIPLICATION, UNSEEN_MULTIPLICATION
from toolformer_dag.synthetic.wordings.subtraction import SUBTRACTION, UNSEEN_SUBTRACTION
from toolformer_dag.synthetic.wordings.word_list import listed, spaced

SCHEMES = (ADDITION, SUBTRACTION, MULTIPLICATION, DIVISION)
UNSEEN_SCHEMES = (UNSEEN_ADDITION, UNSEEN_SUBTRACTION, UNSEEN_MULTIPLICATION, UNSEEN_DIVISION)
THINGS = spaced(
    "apples pens books coins stamps cards eggs shells stickers marbles oranges tickets bottles chairs flowers cookies "
    "photos stones candles pears nuts bricks letters plates cups ropes lamps hats keys buttons spoons pencils balls "
    "pictures toys rings clocks mirrors pillows shirts shoes gloves blankets carrots potatoes onions lemons plums "
    "melons cakes loaves seeds roses magazines newspapers stools brushes hammers nails kites drums flags maps"
)
GETS = listed(
    "found;bought;won;picked up;received;inherited;was given;made;collected;caught;baked;borrowed;"
    "got;gathered;purchased;acquired;obtained;earned;took home;was sent;dug up"
)
LOSES = listed(
    "lost;sold;gave away;threw away;broke;used up;left behind;lent out;burned;returned;handed over;"
    "dropped;donated;wasted;misplaced;discarded;destroyed;gave up;traded away;shipped off;parted with"
)
CONTAINERS = spaced("box bag jar basket drawer shelf case room crate bucket chest cupboard trunk sack tray barrel")
EVENTS = spaced(
    "concert fair market show match lecture parade exhibition festival wedding picnic party race sale dinner bazaar"
)
TAILS = (".", ".", " {unit}.", " {unit} in all.", " {unit}, as {m} said.", ", nothing more.")
